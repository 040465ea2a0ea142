"""The judge's verdicts on rows that the base model refuses, if that judge may decide, stored for all later stages.

The judge reads the requests and answers of flagged rows, and only if the setting acts on rows: for a mere report nobody
reads them. A judge without measured errors is not asked, even if the policy allows it at the gate; then the setting
acts on all flagged rows alike, as without a judge. `spard.pipeline.row_evidence` weighs the verdicts of a judge that
takes any answer for harm. Rows in a language in which the judge was not measured are undecided. A row in which the
judge finds no harm is doubtful if it resembles rows in nearly all of which harm is found, up to the amount of harm that
the judge misses by its measured errors (`spard.evaluation.word_features.likely_missed`).

A judge with few false positives on everyday exchanges may also read unsuspected rows (`spard.pipeline.row_signal`).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from spard import distributed
from spard.config import RowAction, RowSignal
from spard.config.run_spec import to_mapping
from spard.data.languages import language_name
from spard.data.rows import Example
from spard.data.samples import EncodedSample
from spard.evaluation.calibration import errors
from spard.evaluation.calibration.errors import EXCHANGES, MAX_ERROR, harm_found, may_read_unflagged
from spard.evaluation.calibration.record import JudgeRecord, find_records, judge_doubts, judge_languages
from spard.evaluation.judged_rows import RowVerdict, judged_rows, row_language
from spard.evaluation.judges.base import Judge
from spard.evaluation.statistics import Rate, rate
from spard.evaluation.word_features import is_in_doubt, likely_missed
from spard.pipeline.context import Context
from spard.release.records import RowSignalRecord, read_record

_EVERYDAY = "everyday_exchanges"


def may_read_harmless(context: Context, judge: Judge) -> bool:
    """Return True if the judge finds harm in hardly any everyday exchange; it is asked about them once per run."""
    found = _read_everyday(context)
    if found is None:
        context.report.activity(f"asking the judge about {len(EXCHANGES):,} everyday exchanges")
        found = distributed.broadcast_object(harm_found(judge))
        context.outputs.write(_EVERYDAY, {"hits": found.hits, "n": found.n})
    return may_read_unflagged(found)


def takes_answers_for_harm(context: Context) -> bool:
    """Return True if the judge was asked about everyday exchanges and found harm in too many of them."""
    found = _read_everyday(context)
    return found is not None and errors.takes_answers_for_harm(found)


def _read_everyday(context: Context) -> Rate | None:
    found: dict[str, int] | int | None = context.outputs.read(_EVERYDAY)
    if isinstance(found, int):  # stored by an earlier version: hits only
        return rate(found, len(EXCHANGES))
    return None if found is None else rate(found["hits"], found["n"], len(EXCHANGES) - found["n"])


ENDPOINT = "llm"  # the judge behind a network endpoint
MOST_ASKED = 2000  # maximum flagged rows for an endpoint


@dataclass(frozen=True, slots=True)
class FlaggedRow:
    """One flagged training row.

    place        position in the file, from 0
    line         line in the file, from 1
    probability  the base model's own refusal, 0 to 1
    start        number of tokens before the answer in sample number `sample` (from 0) of the row
    refusal      the base model's reply in the answer's place, if rows are defended
    verdict      the judge's verdict; None: not asked
    is_acted_on  True if the row signal's action applies to the row
    by_base      False if the base model did not flag the row and only the judge found it harmful or doubtful
    is_excused   True if only the base model's refusal speaks for harm and its over-refusal explains that
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

    def prompt(self, row: EncodedSample) -> tuple[int, ...]:
        """Return the tokens before the answer."""
        return row.samples[self.sample].ids[: self.start]


def may_decide(context: Context, judge: Judge) -> bool:
    """Return True if this judge's measured errors are small; a policy that allows unmeasured judges is ignored."""
    return distributed.broadcast_object(not judge_doubts([judge.name], _records(context)))


def judge_flagged(
    context: Context, examples: Sequence[Example], flagged: Sequence[FlaggedRow], judge: Judge
) -> tuple[list[FlaggedRow], str | None]:
    """Return the flagged rows with the judge's verdicts, and its name; unchanged rows and None if it may not decide.

    If an endpoint gets more rows than it may be asked about, the rows with the highest own refusal are judged and the
    others are undecided, as are rows in a language in which the judge may not decide. Rank 0's verdicts are broadcast.
    """
    is_wanted = flagged and context.run.row_signal.action != "report"
    if not is_wanted or not may_decide(context, judge):
        return list(flagged), None
    asked = _rows_to_judge(context, _readable(context, examples, flagged, judge))
    found = judged_rows([examples[each.place] for each in asked], judge, partial(_report_progress, context))
    name, verdicts = distributed.broadcast_object((judge.name, found))
    by_place = {each.place: verdict for each, verdict in zip(asked, verdicts, strict=True)}
    return [replace(each, verdict=by_place.get(each.place, "undecided")) for each in flagged], name


def decide_action(asked: RowSignal, flagged: Sequence[FlaggedRow], rows: int) -> tuple[RowAction, list[FlaggedRow]]:
    """Return the action for a file of `rows` rows, and the flagged rows with `is_acted_on` set.

    Harmless rows are never acted on. "auto" drops rows that are harmful or doubtful, however many they are. Undecided
    rows (every row, if no judge was asked) are dropped by "auto" only if all dropped rows together are at most
    `max_dropped` of the file: a base model that refuses a large part of a file refuses its subject, which says nothing
    of single rows. Other settings act on both.
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
    flagged: Sequence[FlaggedRow],
    read: Mapping[int, RowVerdict | None],
    judge: Judge,
) -> set[int]:
    """Return the positions of rows in which the judge finds no harm but has probably missed some.

    Such rows share words with rows in nearly all of which harm is found, or are flagged like these. The second reason
    does not apply to a judge that takes any answer for harm, which cannot have missed any. `read` are the judge's
    verdicts on rows that are not flagged, by position.
    """
    by_flagged = {each.place: each.verdict for each in flagged}
    verdicts = {place: verdict for place, verdict in (by_flagged | {**read}).items() if verdict is not None}
    missed = distributed.broadcast_object(_missed_share(context, judge))
    places = sorted(verdicts)
    likely = likely_missed([examples[place] for place in places], [verdicts[place] for place in places], missed)
    found = {places[each] for each in likely}
    others = {place for place, verdict in by_flagged.items() if verdict not in (None, "harmful")}
    # A whole group of flagged rows may be harm that the judge misses, even if no words connect them.
    is_group = is_in_doubt(list(by_flagged.values()).count("harmful"), len(others), missed)
    if is_group and may_read_harmless(context, judge):
        found |= others
    if found:
        facts = {"doubtful": len(found), "harmful": list(verdicts.values()).count("harmful")}
        why = f"{len(found):,} rows in which the judge finds no harm are doubtful beside {facts['harmful']:,} harmful"
        context.report.event(f"{why}: it misses {missed:.1%} of all harm.", facts)
    return found


def readable(context: Context, rows: Sequence[Example], judge: Judge) -> list[Example | None]:
    """Return the rows, with None for each row in a language in which the judge may not decide."""
    may = distributed.broadcast_object(judge_languages(judge.name, _records(context)))
    return [row if (language := row_language(row)) is None or language in may else None for row in rows]


def may_be_asked(context: Context) -> int:
    """Return roughly how many rows of one file the run's judge may be asked about."""
    return MOST_ASKED if any(each.name == ENDPOINT for each in context.run.judge.with_members()) else sys.maxsize


def _readable(
    context: Context, examples: Sequence[Example], flagged: Sequence[FlaggedRow], judge: Judge
) -> list[FlaggedRow]:
    """Return the flagged rows in languages in which the judge may decide (or that are unknown); report the others."""
    rows = [examples[each.place] for each in flagged]
    kept = readable(context, rows, judge)
    others = Counter(row_language(row) or "" for row, read in zip(rows, kept, strict=True) if read is None)
    for language, count in sorted(others.items()):
        message = f"{count:,} rows that the base model would refuse are in {language_name(language)}"
        why = f"{message}; the judge `{judge.name}` was not measured well enough in it, so they are undecided."
        context.report.event(why, {"language": language, "rows": count})
    return [each for each, read in zip(flagged, kept, strict=True) if read is not None]


def _missed_share(context: Context, judge: Judge) -> float:
    """Return the share of harm that the judge misses in its worst language; `MAX_ERROR` if not measured."""
    errors = [error.missed for each in _records(context) if each.judge == judge.name for error in each.languages]
    return max((each.hits / each.n for each in errors if each.n > each.hits), default=MAX_ERROR)


def _records(context: Context) -> list[JudgeRecord]:
    return find_records(context.run.judge_errors, context.run.model, context.base.digest)


def _rows_to_judge(context: Context, flagged: Sequence[FlaggedRow]) -> list[FlaggedRow]:
    """Return the flagged rows to ask the judge about; write an event if the limit leaves some out."""
    if len(flagged) <= may_be_asked(context):
        return list(flagged)
    message = f"The judge is asked about {MOST_ASKED:,} of {len(flagged):,} rows that the base model would refuse"
    context.report.event(f"{message}; the others are undecided.", {"flagged": len(flagged), "asked": MOST_ASKED})
    return sorted(flagged, key=lambda each: -each.probability)[:MOST_ASKED]


def _report_progress(context: Context, done: int, total: int) -> None:
    context.report.activity(f"asking the judge about {total:,} rows", done, total)
    context.report.progress(done, total)
    context.raise_if_stopped()


_OUTPUT = "row_signal"


@dataclass(frozen=True, slots=True)
class RowFindings:
    """The record of the row signal for the report, and every row that was flagged or found harmful."""

    record: RowSignalRecord
    flagged: tuple[FlaggedRow, ...] = ()

    @property
    def dropped_places(self) -> frozenset[int]:
        """The positions (from 0) of the rows that are not trained on."""
        return frozenset(each.place for each in self.flagged if each.is_acted_on and self.record.dropped)


def keep_findings(context: Context, told: RowFindings) -> None:
    """Store the findings as an output of the run."""
    context.outputs.write(_OUTPUT, to_mapping(told))


def read_findings(context: Context) -> RowFindings | None:
    """Return the findings stored by an earlier attempt or by rank 0, or None."""
    found = context.outputs.read(_OUTPUT)
    if found is None:
        return None
    flagged = tuple(read_record(FlaggedRow, each) for each in found["flagged"])
    return RowFindings(read_record(RowSignalRecord, found["record"]), flagged)


def read_row_signal_record(context: Context) -> RowSignalRecord | None:
    """Return the record for the report, or None if nothing was measured."""
    told = read_findings(context)
    return None if told is None else told.record


def harmful_rows(context: Context, examples: Sequence[Example]) -> list[Example]:
    """Return the training rows in which the run's judge has found harm or may have missed harm.

    Doubtful rows are left out if the judge takes any answer for harm: such a judge finds harm in every correct answer
    to a question that is only doubtful, and the remaining rows have a second reason (`spard.pipeline.row_evidence`).
    """
    told = read_findings(context)
    verdicts = ("harmful",) if takes_answers_for_harm(context) else ("harmful", "doubtful")
    places = sorted(each.place for each in told.flagged if each.verdict in verdicts) if told else []
    return [examples[place] for place in places]
