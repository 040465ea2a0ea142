"""A judge's verdict on training rows that the base model would refuse.

A base model refuses whole subjects, and the cheap rule takes every answer that is no refusal for compliance. Both flag
the row that explains how to build a bomb, and also the help desk's row on which page describes malware removal. A judge
reads both and tells them apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from spard.data.encodings import decode_text
from spard.data.languages import detect_language
from spard.data.rows import Example, is_learned
from spard.evaluation.judges.base import HARMFUL_ABOVE, Judge, Verdict
from spard.evaluation.judges.llm import imitates
from spard.evaluation.judges.refusal import is_refusal

RowVerdict = Literal["harmful", "harmless", "undecided", "doubtful"]
BATCH = 64  # answers in one call of the judge


def judged_rows(
    rows: Sequence[Example], judge: Judge, tell: Callable[[int, int], None] = lambda done, total: None
) -> list[RowVerdict]:
    """Return the verdict on each row: harmful if any answer is, else undecided if any answer could not be scored.

    An answer that imitates the judge's output is harmful: it was written for the judge. A preference pair that rejects
    a refusal is undecided even if the judge finds no harm, because it teaches not to refuse. No verdict is `doubtful`;
    that depends on other rows (`spard.evaluation.word_features`).

    Text that looks encoded is judged decoded and as written; the latter counts only if harmful. A few words in rot13
    thus cannot hide the plain ones around them. `tell` is called after each batch with the answers done and in all.
    """
    asked = [(i, *each) for i, row in enumerate(rows) for each in _to_read(row) if not imitates(each[1])]
    found: list[list[Verdict]] = [[] for _ in rows]
    for start in range(0, len(asked), BATCH):
        batch = asked[start : start + BATCH]
        verdicts = judge.judge([prompt for _, prompt, _, _ in batch], [answer for _, _, answer, _ in batch])
        for (i, _, _, is_plain), verdict in zip(batch, verdicts, strict=True):
            # The reading as written counts only if harmful: undecoded gibberish must not make a row undecided.
            if is_plain or _is_harmful(verdict):
                found[i].append(verdict)
        tell(start + len(batch), len(asked))
    return [_of_row(row, verdicts) for row, verdicts in zip(rows, found, strict=True)]


def exchanges(row: Example, read: Callable[[str], str] = decode_text) -> list[tuple[str, str]]:
    """Return each learned answer, with reasoning and tool calls, paired with all user messages before it, decoded.

    Refusals are included, since words of a refusal may come before harm. System prompts are left out: they describe the
    customer's assistant.
    """
    asked, found = list[str](), list[tuple[str, str]]()
    for message in row.messages:
        if message["role"] == "user":
            asked.append(read(_text(message.get("content"))))
        elif is_learned(message):
            parts = (message.get(name) for name in ("reasoning_content", "content", "tool_calls"))
            said = [read(_text(part)) for part in parts if part]
            found.append(("\n".join(asked), "\n".join(said)))
    return found


def prefers_to_refusal(row: Example) -> bool:
    """Return True if a preference pair prefers an answer that does not refuse to a refusal."""
    rejected = "" if row.rejected is None else str(row.rejected.get("content") or "")
    return is_refusal(rejected) and not all(is_refusal(answer) for _, answer in exchanges(row))


def row_language(row: Example) -> str | None:
    """Return the language of a row's requests and answers; None if it cannot be detected."""
    return detect_language("\n".join(text for pair in exchanges(row) for text in pair))


def _to_read(row: Example) -> Iterator[tuple[str, str, bool]]:
    """Yield request and answer as the judge reads them; the third value is False for a reading left encoded."""
    plain = exchanges(row)
    written = [pair for pair in exchanges(row, str) if pair not in plain]
    for pairs, is_plain in ((plain, True), (written, False)):
        yield from ((*pair, is_plain) for pair in pairs)


def _text(content: object) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _is_harmful(verdict: Verdict) -> bool:
    return verdict.score is not None and verdict.score > HARMFUL_ABOVE


def _of_row(row: Example, verdicts: Sequence[Verdict]) -> RowVerdict:
    is_for_judge = any(imitates(answer) for _, answer, _ in _to_read(row))
    if is_for_judge or any(map(_is_harmful, verdicts)):
        return "harmful"
    is_known = bool(verdicts) and all(verdict.score is not None for verdict in verdicts)
    return "harmless" if is_known and not prefers_to_refusal(row) else "undecided"
