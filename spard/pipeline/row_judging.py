"""What the run's judge says of rows that the base model would refuse, where that judge may decide.

It reads the flagged rows' requests and answers, and only where the setting acts on rows: a report alone has nobody
read them. A judge that nobody has measured is not asked, whatever the policy lets the gate hear, and all flagged rows
are acted on alike, as without a judge. What the verdict of a judge is worth that takes any answer for harm is told in
`spard.pipeline.row_evidence`. Rows in a language in which the judge was not measured are undecided. Rows in which it
finds no harm are doubtful where they have something in common with rows in nearly all of which it does, as far as its
measured errors say that it missed some (`spard.evaluation.missed_harm`). What else it reads is told in
`spard.pipeline.unflagged_rows`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from spard import distributed
from spard.config import RowAction, RowSignal
from spard.data.encoded import Encoded
from spard.data.languages import language_name
from spard.data.rows import Example
from spard.evaluation.calibration.errors import MAX_ERROR
from spard.evaluation.calibration.record import JudgeRecord, find_records, judge_doubts, judge_languages
from spard.evaluation.judged_rows import RowVerdict, judged_rows, row_language
from spard.evaluation.judges.base import Judge
from spard.evaluation.missed_harm import is_in_doubt, likely_missed
from spard.pipeline.context import Context
from spard.pipeline.judge_false_positives import may_read_harmless

ENDPOINT = "llm"  # the judge that is asked over a network
MOST_ASKED = 2000  # flagged rows that an endpoint is asked about


@dataclass(frozen=True, slots=True)
class Flagged:
    """One training row that is flagged: its place in the file and its line, counted from 0 and from 1.

    `start` is how many tokens stand before the answer in a sample of the row, counted from 0 by `sample`; `refusal` is
    what the base model would say there, if rows are defended. `verdict` is the judge's, None where it was not asked;
    the setting acts on the row where `is_acted_on`. `by_base` is False of a row that the base model would hardly have
    refused: it is harmful or doubtful to the judge.
    `is_excused` where nothing but the base model speaks against the row and its over-refusal explains that.
    """

    place: int
    line: int
    probability: float
    start: int
    refusal: str | None = None
    verdict: RowVerdict | None = None
    is_acted_on: bool = True
    by_base: bool = True
    sample: int = 0
    is_excused: bool = False

    def prompt(self, row: Encoded) -> tuple[int, ...]:
        """Return the tokens before the answer."""
        return row.samples[self.sample].ids[: self.start]


def may_decide(context: Context, judge: Judge) -> bool:
    """Return whether this judge's measured errors are small. What a policy lets the gate hear is no measurement."""
    return distributed.broadcast_object(not judge_doubts([judge.name], _records(context)))


def judge_flagged(
    context: Context, examples: Sequence[Example], flagged: Sequence[Flagged], judge: Judge
) -> tuple[list[Flagged], str | None]:
    """Return the flagged rows with their verdicts, and the judge's name; as they are, and None, if it is not asked.

    Of more rows than an endpoint is asked about, those that the base model would most surely refuse are; the others
    are undecided, and so are rows in a language in which the judge may not decide. The ranks of a run have the verdicts
    of the first one's judge.
    """
    is_wanted = flagged and context.run.row_signal.action != "report"
    if not is_wanted or not may_decide(context, judge):
        return list(flagged), None
    asked = _rows_to_judge(context, _readable(context, examples, flagged, judge))
    found = judged_rows([examples[each.place] for each in asked], judge, partial(_report_progress, context))
    name, verdicts = distributed.broadcast_object((judge.name, found))
    by_place = {each.place: verdict for each, verdict in zip(asked, verdicts, strict=True)}
    return [replace(each, verdict=by_place.get(each.place, "undecided")) for each in flagged], name


def decide_action(asked: RowSignal, flagged: Sequence[Flagged], rows: int) -> tuple[RowAction, list[Flagged]]:
    """Return what becomes of a file of so many rows, and the flagged ones, each with whether that is done to it.

    A row that the judge finds harmless is let be. "auto" drops what it finds harmful and what is doubtful beside that,
    however much it is. What it cannot score is undecided, and so is every row without a judge: "auto" drops that only
    where all it would drop is few, since a base model that would refuse much of a file refuses its subject and says
    nothing of single rows. Other settings act on both.
    """
    found = [each for each in flagged if each.verdict in ("harmful", "doubtful")]
    undecided = [each for each in flagged if each.verdict in (None, "undecided") and not each.is_excused]
    acts_on_all = asked.action != "auto" or len(found) + len(undecided) <= asked.max_dropped * rows
    acted = {each.place for each in (*found, *(undecided if acts_on_all else ()))}
    marked = [replace(each, is_acted_on=each.place in acted) for each in flagged]
    return ("drop" if acted else "report") if asked.action == "auto" else asked.action, marked


def doubtful(
    context: Context,
    examples: Sequence[Example],
    flagged: Sequence[Flagged],
    read: Mapping[int, RowVerdict | None],
    judge: Judge,
) -> set[int]:
    """Return the places of rows in which the judge finds no harm and that are likely harm which it missed.

    They share words with rows in nearly all of which it finds harm, or are flagged as these are. The latter is no
    reason where the judge takes any answer for harm: it has read nothing that it could have missed. `read` are the
    judge's verdicts on rows that are not flagged.
    """
    by_flagged = {each.place: each.verdict for each in flagged}
    verdicts = {place: verdict for place, verdict in (by_flagged | {**read}).items() if verdict is not None}
    missed = distributed.broadcast_object(_missed_share(context, judge))
    places = sorted(verdicts)
    likely = likely_missed([examples[place] for place in places], [verdicts[place] for place in places], missed)
    found = {places[each] for each in likely}
    others = {place for place, verdict in by_flagged.items() if verdict not in (None, "harmful")}
    is_group = is_in_doubt(list(by_flagged.values()).count("harmful"), len(others), missed)
    if is_group and may_read_harmless(context, judge):
        found |= others
    if found:
        facts = {"doubtful": len(found), "harmful": list(verdicts.values()).count("harmful")}
        why = f"{len(found):,} rows in which the judge finds no harm are doubtful beside {facts['harmful']:,} harmful"
        context.report.event(f"{why}: it misses {missed:.1%} of all harm.", facts)
    return found


def readable(context: Context, rows: Sequence[Example], judge: Judge) -> list[Example | None]:
    """Return the rows, with None in the place of each whose language is one in which the judge may not decide."""
    may = distributed.broadcast_object(judge_languages(judge.name, _records(context)))
    return [row if (language := row_language(row)) is None or language in may else None for row in rows]


def may_be_asked(context: Context) -> int:
    """Return about how many rows of one file the run's judge may be asked."""
    return MOST_ASKED if any(each.name == ENDPOINT for each in context.run.judge.with_members()) else sys.maxsize


def _readable(context: Context, examples: Sequence[Example], flagged: Sequence[Flagged], judge: Judge) -> list[Flagged]:
    """Return the rows in languages in which the judge may decide, or that are not told, and tell of the others."""
    rows = [examples[each.place] for each in flagged]
    kept = readable(context, rows, judge)
    others = Counter(row_language(row) or "" for row, read in zip(rows, kept, strict=True) if read is None)
    for language, count in sorted(others.items()):
        message = f"{count:,} rows that the base model would refuse are in {language_name(language)}"
        why = f"{message}; the judge `{judge.name}` was not measured well enough in it, so they are undecided."
        context.report.event(why, {"language": language, "rows": count})
    return [each for each, read in zip(flagged, kept, strict=True) if read is not None]


def _missed_share(context: Context, judge: Judge) -> float:
    """Return the measured share of harm that the judge misses, in its worst language; `MAX_ERROR` if not measured."""
    errors = [error.missed for each in _records(context) if each.judge == judge.name for error in each.languages]
    return max((each.hits / each.n for each in errors if each.n > each.hits), default=MAX_ERROR)


def _records(context: Context) -> list[JudgeRecord]:
    return find_records(context.run.judge_errors, context.run.model, context.base.digest)


def _rows_to_judge(context: Context, flagged: Sequence[Flagged]) -> list[Flagged]:
    """Return the rows that the judge is asked about, and tell where it is not asked about all."""
    if len(flagged) <= may_be_asked(context):
        return list(flagged)
    message = f"The judge is asked about {MOST_ASKED:,} of {len(flagged):,} rows that the base model would refuse"
    context.report.event(f"{message}; the others are undecided.", {"flagged": len(flagged), "asked": MOST_ASKED})
    return sorted(flagged, key=lambda each: -each.probability)[:MOST_ASKED]


def _report_progress(context: Context, done: int, total: int) -> None:
    context.report.activity(f"asking the judge about {total:,} rows", done, total)
    context.report.progress(done, total)
    context.raise_if_stopped()
