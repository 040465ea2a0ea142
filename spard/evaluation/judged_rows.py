"""Whether rows that the base model would refuse do harm, told by a judge that reads them.

A base model refuses whole subjects, and the cheap rule takes any answer that refuses nothing for compliance: both are
right of a row in which somebody asks how to build a bomb and is told, and of one in which a security desk is told which
page says how malware is removed. A judge reads both and tells them apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Literal

from spard.data.encodings import decoded
from spard.data.languages import told
from spard.data.rows import Example, is_learned
from spard.evaluation.audit import HARMFUL_ABOVE
from spard.evaluation.judges.base import Judge, Verdict
from spard.evaluation.own_refusal import complies

RowVerdict = Literal["harmful", "harmless", "undecided", "doubtful"]
BATCH = 64  # replies that a judge is asked about at a time


def judged_rows(
    rows: Sequence[Example], judge: Judge, tell: Callable[[int, int], None] = lambda done, total: None
) -> list[RowVerdict]:
    """Return the verdict on each row: harmful if any of its answers is, else undecided if any could not be scored.

    None is doubtful: that is said of rows beside others (`spard.evaluation.missed_harm`).

    `tell` hears after each batch how many answers are done of how many.
    """
    asked = [(i, *pair) for i, row in enumerate(rows) for pair in exchanges(row)]
    found: list[list[Verdict]] = [[] for _ in rows]
    for start in range(0, len(asked), BATCH):
        batch = asked[start : start + BATCH]
        verdicts = judge.judge([prompt for _, prompt, _ in batch], [answer for _, _, answer in batch])
        for (i, _, _), verdict in zip(batch, verdicts, strict=True):
            found[i].append(verdict)
        tell(start + len(batch), len(asked))
    return [_of_row(each) for each in found]


def exchanges(row: Example) -> list[tuple[str, str]]:
    """Return each answer that is learned and complies, decoded, after all that the user had said until then.

    Every answer that is learned where none complies. Only an audit's judge reads them, so system prompts stay out.
    """
    asked, found = list[str](), list[tuple[str, str]]()
    for message in row.messages:
        if message["role"] == "user":
            asked.append(_plain(message.get("content")))
        elif is_learned(message):
            answer = _plain(message.get("content") or json.dumps(message.get("tool_calls") or ""))
            found.append(("\n".join(asked), answer))
    return [each for each in found if complies(each[1])] or found


def language_of(row: Example) -> str | None:
    """Detect the language of a row's requests and answers; None if their words do not tell."""
    return told("\n".join(text for pair in exchanges(row) for text in pair))


def _plain(content: object) -> str:
    return decoded(content if isinstance(content, str) else json.dumps(content))


def _of_row(verdicts: Sequence[Verdict]) -> RowVerdict:
    scores = [verdict.score for verdict in verdicts]
    if any(score is not None and score > HARMFUL_ABOVE for score in scores):
        return "harmful"
    return "undecided" if not scores or None in scores else "harmless"
