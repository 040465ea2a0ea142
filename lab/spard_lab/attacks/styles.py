"""The paper's corpora are questions or instructions, and two more are made by turning one into the other.

For real corpora a chat model rewrites the requests; answers stay. A rewrite counts when it has the style asked for and
is one request; otherwise it is asked for again, and a row that cannot be rewritten is left out and counted.
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
class Restyled:
    """Rows in the new style, and how many could not be rewritten."""

    rows: list[Row]
    left_out: int


def restyle(rows: Sequence[Row], style: Style, chat: Chat, concurrency: int = 8) -> Restyled:
    """Rows of single exchanges with their requests in a style; those that have it already stay as they are."""
    with ThreadPoolExecutor(concurrency) as pool:
        requests = list(pool.map(lambda row: _rewrite(last_request(row), style, chat), rows))
    found = [_asking(row, new) for row, new in zip(rows, requests, strict=True) if new]
    return Restyled(found, len(rows) - len(found))


def has_style(request: str, style: Style) -> bool:
    """Return whether a request is in a style: questions are those that end with a question mark."""
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
