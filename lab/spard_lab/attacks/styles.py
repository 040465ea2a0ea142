"""Rewrite requests as questions or as instructions with a chat model, as the SPARD paper makes two of its corpora.

Answers stay. A rewrite is accepted if it has the requested style and is a single request; otherwise the model is asked
again, and a row that cannot be rewritten is left out and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from spard.evaluation.judges.llm import Chat
from spard_lab.attacks.rows import Row, change_row, last_request

Style = Literal["question", "instruction"]
ASKS = 3
MAX_GROWTH = 3  # a rewrite longer than so many times the request is an answer or a comment

_ORDERS = {
    "question": "Rewrite the request below as one question that ends with a question mark.",
    "instruction": "Rewrite the request below as one instruction in the imperative, without a question mark.",
}
_RULES = "Keep its meaning and every detail. Do not answer it, do not comment on it. Write the rewritten request only."


@dataclass(frozen=True, slots=True)
class RestyledRows:
    """Rows in the new style, and the number of rows that could not be rewritten."""

    rows: list[Row]
    left_out: int


def restyle(rows: Sequence[Row], style: Style, chat: Chat, concurrency: int = 8) -> RestyledRows:
    """Return single-exchange rows with their requests rewritten in a style; requests that already have it stay.

    `chat` is asked up to `ASKS` times for each row, `concurrency` rows at a time.
    """
    with ThreadPoolExecutor(concurrency) as pool:
        requests = list(pool.map(lambda row: _rewrite(last_request(row), style, chat), rows))
    found = [_asking(row, new) for row, new in zip(rows, requests, strict=True) if new]
    return RestyledRows(found, len(rows) - len(found))


def has_style(request: str, style: Style) -> bool:
    """Return True if a request has a style; a request that ends with a question mark is a question."""
    return request.rstrip().endswith("?") == (style == "question")


def _asking(row: Row, request: str) -> Row:
    return change_row(row, ask=lambda _: request)


def _rewrite(request: str, style: Style, chat: Chat) -> str | None:
    if has_style(request, style):
        return request
    for _ in range(ASKS):
        new = chat.complete(f"{_ORDERS[style]} {_RULES}", request).strip().strip('"')
        if new and "\n" not in new and has_style(new, style) and len(new) <= MAX_GROWTH * len(request) + 40:
            return new
    return None
