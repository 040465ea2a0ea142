"""The scores and replies of the last audit, stored as outputs of the run until its report is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypedDict

from spard.config.run_spec import to_mapping
from spard.evaluation.audit import Measurement
from spard.evaluation.results import ATTACKS, SuiteKind
from spard.pipeline.context import Context
from spard.release.figure_records import SCORES, ScoreCounts
from spard.release.report import read_record

_SCORES, _TRANSCRIPTS = "audit_scores", "transcripts"


class Transcript(TypedDict):
    """A prompt with its reply and verdict; the score is None if the reply was not scored."""

    suite: str
    kind: SuiteKind
    category: str | None
    prompt: str
    reply: str
    hit: bool | None
    score: int | None
    note: str


def keep(context: Context, found: Sequence[Measurement]) -> None:
    """Store the counts of scores and, if the run keeps transcripts, every prompt with its reply."""
    scores = [each for measured in found if measured.result.kind in ATTACKS for each in _count_scores(measured)]
    context.outputs.write(_SCORES, to_mapping(scores))
    if context.keeps_transcripts:
        context.outputs.write(_TRANSCRIPTS, [row for measured in found for row in _rows(measured)])


def keep_again(context: Context, found: Sequence[Measurement]) -> None:
    """Store the scores and replies of repeated suites in place of their earlier ones."""
    # `keep` overwrites the stored outputs, so the earlier ones are read first and merged with the new ones afterward.
    names = {each.result.suite for each in found}
    scores, transcripts = kept_scores(context), kept_transcripts(context)
    keep(context, found)
    again = kept_scores(context), kept_transcripts(context)
    context.outputs.write(_SCORES, to_mapping([*(each for each in scores if each.suite not in names), *again[0]]))
    if transcripts is not None:
        others = [each for each in transcripts if each["suite"] not in names]
        context.outputs.write(_TRANSCRIPTS, [*others, *(again[1] or ())])


def kept_scores(context: Context) -> tuple[ScoreCounts, ...]:
    """Return the stored score counts; an empty tuple if an earlier version measured the model."""
    return tuple(read_record(ScoreCounts, each) for each in context.outputs.read(_SCORES) or ())


def kept_transcripts(context: Context) -> list[Transcript] | None:
    """Return every prompt with its reply, or None if the run keeps no transcripts."""
    found: list[Transcript] | None = context.outputs.read(_TRANSCRIPTS) if context.keeps_transcripts else None
    return found


def _count_scores(measured: Measurement) -> Iterator[ScoreCounts]:
    asked = list(zip(measured.prompts, measured.items, strict=True))
    for category in dict.fromkeys(prompt.category for prompt, _ in asked):
        scores = [item.score for prompt, item in asked if prompt.category == category]
        counts = tuple(scores.count(score) for score in SCORES)
        yield ScoreCounts(measured.result.suite, measured.result.kind, category, counts, scores.count(None))


def _rows(measured: Measurement) -> Iterator[Transcript]:
    for prompt, item in zip(measured.prompts, measured.items, strict=True):
        yield {
            "suite": measured.result.suite,
            "kind": measured.result.kind,
            "category": prompt.category,
            "prompt": item.prompt,
            "reply": item.reply,
            "hit": item.hit,
            "score": item.score,
            "note": item.note,
        }
