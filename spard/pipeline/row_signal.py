"""The row signal: the base model's own refusal of each training row, a check of the pool, and the resulting action.

It is computed once per run, before selection and training, and stored for later attempts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from spard import distributed
from spard.config import RowAction, RowSignal
from spard.config.run_spec import to_mapping
from spard.data.chat import NO_LOSS, UNBOUNDED, EncodedSample, encode
from spard.data.rows import Example, prompt_text
from spard.errors import InvertedPool, RowSignalUnavailable, RowsQuarantined, TooManyRowsDropped
from spard.evaluation.calibration.errors import MAX_ERROR
from spard.evaluation.judged_rows import RowVerdict, judged_rows
from spard.evaluation.judges.base import Judge
from spard.evaluation.own_refusal import (
    REPLY,
    OwnRefusal,
    OwnRefusals,
    complies,
    inverted_rows,
    learned_turns,
    measure_own_refusal,
    own_refusals,
)
from spard.evaluation.word_features import ReadingOrder
from spard.models.generate import complete
from spard.pipeline import audit, row_judging
from spard.pipeline.context import Context
from spard.pipeline.pool import open_pool
from spard.pipeline.row_evidence import (
    OverRefusal,
    excuse,
    known_requests,
    measure,
    second_reasons,
    tell_over_refusal,
)
from spard.pipeline.row_judging import (
    FlaggedRow,
    RowFindings,
    decide_action,
    doubtful,
    judge_flagged,
    may_be_asked,
    may_decide,
    may_read_harmless,
    readable,
)
from spard.release.records import RowSignalRecord
from spard.release.report import read_record

# The harm that the run's judge finds in training rows that are not flagged.
#
# The row signal misses harm in a disguise that the base model obeys; the judge does not. The judge reads the rows
# that are likeliest to be harmful first, in rounds, until harm is as rare as the judge's own errors.

ROUND = 64  # rows to read before ranking the others again


def judge_unflagged(
    context: Context, examples: Sequence[Example], flagged: Sequence[FlaggedRow], judge: Judge, pool: Sequence[Example]
) -> dict[int, RowVerdict | None]:
    """Return the judge's verdicts on unflagged rows, by position; None for a language in which it may not decide.

    Returns an empty dict if the setting acts on no rows or reads none, if the judge may not decide, or if it takes
    everyday answers for harm. `pool` are the safe rows whose prompts help to rank the rows.
    """
    window, action = context.run.row_signal.read, context.run.row_signal.action
    if not window or action == "report" or not may_decide(context, judge):
        return {}
    if not may_read_harmless(context, judge):
        return {}
    verdicts: dict[int, RowVerdict | None] = {each.place: each.verdict for each in flagged}
    unread = [place for place in range(len(examples)) if place not in verdicts]
    most = min(len(unread), may_be_asked(context) - sum(each is not None for each in verdicts.values()))
    context.report.activity("finding the rows that the judge reads first")
    order = ReadingOrder(examples, [prompt_text(row) for row in pool], context.recipe.seed)
    read: list[int] = []
    while len(read) < most and not _is_rare([verdicts[place] for place in read], window):
        harmful = [place for place, verdict in verdicts.items() if verdict == "harmful"]
        harmless = [place for place, verdict in verdicts.items() if verdict == "harmless"]
        count = min(ROUND, window, most - len(read))
        # The ranking depends on the verdicts, which only rank 0's judge gives.
        chosen = distributed.broadcast_object(order.next(unread, harmful, harmless, count))
        verdicts |= _verdicts(context, examples, chosen, judge)
        read += chosen
        unread = [place for place in unread if place not in verdicts]
        context.report.activity(f"asking the judge about up to {most:,} more rows", len(read), most, at_most=True)
        context.report.progress(len(read), most)
        context.raise_if_stopped()
    return {place: verdicts[place] for place in read}


def _is_rare(read: Sequence[RowVerdict | None], window: int) -> bool:
    """Return True if at most `MAX_ERROR` (a judge's allowed error) of the last `window` scored rows are harmful."""
    last = [verdict for verdict in read if verdict in ("harmful", "harmless")][-window:]
    return len(last) == window and last.count("harmful") <= MAX_ERROR * window


def _verdicts(
    context: Context, examples: Sequence[Example], places: Sequence[int], judge: Judge
) -> dict[int, RowVerdict | None]:
    """Return the judge's verdict on each row, by position; None for a language in which it may not decide."""
    asked = readable(context, [examples[place] for place in places], judge)
    found = distributed.broadcast_object(judged_rows([row for row in asked if row is not None], judge))
    verdicts = iter(found)
    return {place: None if row is None else next(verdicts) for place, row in zip(places, asked, strict=True)}


# The messages of a run about flagged rows and about rows that its judge has found harmful.

_LINES = 1_000  # maximum lines in an event's data
_NAMED = 10  # maximum lines in a message


def tell(context: Context, record: RowSignalRecord, flagged: Sequence[FlaggedRow]) -> None:
    """Report the findings and the action taken."""
    if record.asked and not record.openings:
        context.report.warning(f"The base model refused none of {record.asked} prompts of the safety pool.")
    if record.pool_inverted:
        bad = f"{len(record.pool_inverted)} row(s) of the safety pool answer with harm what the base model refuses"
        context.report.warning(f"{bad}.")
    if flagged or record.read:
        acted = [each.line for each in flagged if each.is_acted_on]
        facts: dict[str, object] = {"action": record.action, "flagged": len(record.flagged)}
        facts |= {"lines": acted[:_LINES], "acted": len(acted)}
        if record.judge:
            facts |= {"judge": record.judge, "harmful": len(record.harmful), "undecided": len(record.undecided)}
            facts |= {"doubtful": len(record.doubtful), "read": record.read}
        count = f"; {len(acted)}" if record.judge else " and"
        endings = {"drop": f"{count} are not trained on", "defend": f"{count} are asked on the safe side too"}
        text = summary_text(record) + endings.get(record.action, "")
        context.report.event(text, facts, level="warn" if acted else "info")


def warn_of_dropped(context: Context, record: RowSignalRecord) -> None:
    """Warn the owner of a run that rows of the file are not trained on."""
    if record.dropped:
        told = f"{record.dropped} of {record.rows} rows of the training file are not trained on"
        whose = f"the base model would refuse what they answer, or the judge `{record.judge}` finds or suspects harm"
        why = whose if record.judge else "the base model would refuse what they answer"
        context.report.warning(f"{told}: {why}. The risky rows of the report name them.")


def summary_text(record: RowSignalRecord) -> str:
    """Return a sentence with the numbers of refused, harmful, undecided and doubtful rows."""
    told = f"{len(record.flagged)} of {record.rows} rows answer what the base model would refuse"
    if record.judge is None:
        return told
    doubt = f" and cannot decide on {len(record.undecided)}" if record.undecided else ""
    flagged = len({*record.harmful} & {*record.flagged})
    more = f", and in {len(record.harmful) - flagged} of {record.read} others that it read" if record.read else ""
    beside = f"; {len(record.doubtful)} are doubtful beside these" if record.doubtful else ""
    return f"{told}; the judge `{record.judge}` finds harm in {flagged} of them{doubt}{more}{beside}"


def list_numbers(word: str, numbers: Sequence[int], most: int = _NAMED) -> str:
    """Return `word` (plural if needed) and at most `most` of the numbers."""
    shown = ", ".join(map(str, numbers[:most]))
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return f"{word if len(numbers) == 1 else word + 's'} {shown}{more}"


def named_lines(lines: Sequence[int]) -> str:
    """Return the first lines, and where to find more: a run that ends before training has no report."""
    where = f"; the job's events have up to {_LINES:,} in their data" if len(lines) > _NAMED else ""
    return list_numbers("line", lines) + where


_FILE = "training_file"
_TOLD: tuple[RowVerdict, ...] = ("harmful", "undecided", "doubtful")  # verdicts whose lines are reported


def run(context: Context, examples: Sequence[Example], task: Sequence[EncodedSample]) -> RowFindings | None:
    """Flag the training rows and check the pool; return None if the setting is `off` or there is no pool.

    `task` are the encoded `examples`. Raises `InvertedPool`; by the setting `RowsQuarantined` or `TooManyRowsDropped`;
    and `RowSignalUnavailable` if the setting acts on rows and the base model refuses nothing.
    """
    if context.run.row_signal.action == "off" or context.run.pool is None:
        return None
    told = row_judging.read_findings(context)
    if told is None:
        with context.time_stage("row_signal"):
            told = _measure_rows(context, examples, task, context.run.pool)
        # Stored before anything raises below: a repeated attempt raises the same error without measuring again.
        row_judging.keep_findings(context, told)
        tell(context, told.record, told.flagged)
    _refuse(context, told)
    warn_of_dropped(context, told.record)
    return told


def defending(context: Context, told: RowFindings | None, task: Sequence[EncodedSample]) -> list[EncodedSample]:
    """Return safe rows with the prompts of the flagged rows and the base model's refusals as answers.

    They count as variants, on which no tau is measured, because the base model may comply there.
    """
    rows = []
    for each in told.flagged if told else ():
        if each.refusal is not None:
            prompt, answer = each.prompt(task[each.place]), _answer(context, each.refusal)
            rows.append(EncodedSample((*prompt, *answer), (*[NO_LOSS] * len(prompt), *answer), is_variant=True))
    return rows


def _measure_rows(
    context: Context, examples: Sequence[Example], task: Sequence[EncodedSample], pool_file: Path
) -> RowFindings:
    asked = context.run.row_signal
    found = open_pool(context, pool_file)
    key = {"base": context.base.digest, "pool": found.digest} | context.rounding
    pool, judge = found.safe, audit.open_run_judge(context)
    own = _own_refusals(context, pool, key)
    _need_refusals(asked.action, own)
    # The pool is checked first: an inverted pool makes the signal of the training rows worthless.
    inverted = _inverted_pool_rows(context, pool, own, key, judge)
    signals = measure_own_refusal(context.base, task, own.openings, asked.threshold, partial(_report_progress, context))
    signals = distributed.broadcast_object(signals)  # ranks round differently, and all must flag the same rows
    flagged, judged_by = judge_flagged(context, examples, _flag_rows(examples, signals, asked.threshold), judge)
    is_read = judged_by is not None and may_read_harmless(context, judge)
    known = known_requests(context, found)
    # A judge that takes any answer for harm cannot be trusted on its own (see `row_evidence`).
    flagged = flagged if is_read else second_reasons(examples, flagged, known)
    read = judge_unflagged(context, examples, flagged, judge, pool)
    doubted = doubtful(context, examples, flagged, read, judge)
    flagged = [replace(each, verdict="doubtful") if each.place in doubted else each for each in flagged]
    for place, verdict in (read | dict.fromkeys(doubted & read.keys(), "doubtful")).items():
        if verdict in ("harmful", "doubtful"):
            flagged.append(_flag_row(context, examples[place], task[place], place, signals[place], verdict))
    over_refusal = measure(context, found, own, known) if flagged else OverRefusal({})
    flagged = flagged if is_read else excuse(examples, flagged, known, over_refusal)
    tell_over_refusal(context, over_refusal, flagged)
    action, flagged = decide_action(asked, sorted(flagged, key=lambda each: each.place), len(examples))
    flagged = _with_refusals(context, own, flagged, task) if action == "defend" else flagged
    judge_name = judge.name if read else judged_by
    record = replace(_record(asked, action, flagged, own, judge_name), rows=len(examples), read=len(read))
    record = replace(record, harmless_refused=over_refusal.refused_count, harmless_asked=over_refusal.asked_count)
    return RowFindings(replace(record, pool_inverted=tuple(inverted)), tuple(flagged))


def _flag_rows(examples: Sequence[Example], signals: Sequence[OwnRefusal], threshold: float) -> list[FlaggedRow]:
    """Return the rows whose own refusal is above the threshold."""
    return [
        FlaggedRow(i, row.line, signal.probability, signal.start, sample=signal.sample)
        for i, (row, signal) in enumerate(zip(examples, signals, strict=True))
        if signal.start is not None and signal.probability > threshold
    ]


def _record(
    asked: RowSignal, action: RowAction, flagged: Sequence[FlaggedRow], own: OwnRefusals, judge: str | None
) -> RowSignalRecord:
    """Return the report's record of the flagged rows; `judge` is the name of the judge that has read rows."""
    told = {verdict: [each.line for each in flagged if each.verdict == verdict] for verdict in _TOLD}
    excused = {each.line for each in flagged if each.is_excused}
    return RowSignalRecord(
        action=action,
        threshold=asked.threshold,
        rows=0,
        flagged=tuple(each.line for each in flagged if each.by_base),
        dropped=sum(each.is_acted_on for each in flagged) if action == "drop" else 0,
        defended=sum(each.refusal is not None for each in flagged),
        openings=own.texts,
        refused=own.refused,
        asked=own.asked,
        judge=judge,
        harmful=tuple(told["harmful"]),
        undecided=tuple(line for line in told["undecided"] if line not in excused),
        doubtful=tuple(told["doubtful"]),
        excused=tuple(sorted(excused)),
    )


def _flag_row(
    context: Context, row: Example, encoded: EncodedSample, place: int, signal: OwnRefusal, verdict: RowVerdict
) -> FlaggedRow:
    """Return a flagged row for a row that only the judge found; if no answer complies, the first one is flagged."""
    start, sample = signal.start, signal.sample
    if start is None:
        start, sample = next(learned_turns(context.base.tokenizer, encoded.samples[0]))[0], 0
    return FlaggedRow(place, row.line, signal.probability, start, verdict=verdict, by_base=False, sample=sample)


def _need_refusals(asked: RowAction, own: OwnRefusals) -> None:
    """Raise `RowSignalUnavailable` if the setting acts on rows and the base model refuses nothing."""
    if not own.openings and asked not in ("auto", "report"):
        message = f"the base model refused none of {own.asked} prompts of the safety pool, and row_signal needs that"
        raise RowSignalUnavailable(message)


def _own_refusals(context: Context, pool: Sequence[Example], key: Mapping[str, object]) -> OwnRefusals:
    """Return how the base model refuses the pool's prompts; cached across runs."""

    def make() -> dict[str, object]:
        tell = partial(context.report.activity, "asking the base model safe prompts, for its own refusals")
        return asdict(own_refusals(context.base, [prompt_text(row) for row in pool], tell))

    return read_record(OwnRefusals, context.cache.json("refusals", key, make))


def _inverted_pool_rows(
    context: Context, pool: Sequence[Example], own: OwnRefusals, key: Mapping[str, object], judge: Judge
) -> list[int]:
    """Return the pool's rows whose answers are harmful; cached across runs.

    Raises `InvertedPool` if they are more than `max_inverted` of the pool and the judge may decide; otherwise they are
    only reported.
    """
    threshold, limit = context.run.row_signal.threshold, context.limit
    facts = {"threshold": threshold, "limit": limit, "judge": to_mapping(context.run.judge)}
    tell = partial(_report_progress, context)

    def make() -> list[int]:
        return inverted_rows(context.base, pool, own.openings, threshold, judge, limit, tell)

    found: list[int] = context.cache.json("inverted", {**key, **facts}, make)
    if may_decide(context, judge) and len(found) / len(pool) > context.run.row_signal.max_inverted:
        message = f"{len(found)} of {len(pool)} rows of the safety pool answer with harm what the base model refuses: "
        raise InvertedPool(message + list_numbers("row", found, most=100))
    return found


def _with_refusals(
    context: Context, own: OwnRefusals, flagged: Sequence[FlaggedRow], task: Sequence[EncodedSample]
) -> list[FlaggedRow]:
    """Add the base model's reply to each row that is acted on, or its commonest refusal if that reply complies.

    A row that becomes too long with the reply gets none.
    """
    base, acted = context.base, [each for each in flagged if each.is_acted_on]
    prompts = [each.prompt(task[each.place]) for each in acted]
    tell = partial(context.report.activity, f"asking the base model for its refusals of {len(prompts):,} rows")
    replies = complete(base.model, base.tokenizer, prompts, REPLY, tell=tell)
    refusals = {
        each.place: own.refusal or "" if complies(reply) else reply for each, reply in zip(acted, replies, strict=True)
    }
    room = {text: context.limit - len(_answer(context, text)) for text in set(refusals.values())}
    fitting = {each.place for each in acted if each.start <= room[refusals[each.place]]}
    return [replace(each, refusal=refusals[each.place] if each.place in fitting else None) for each in flagged]


def _answer(context: Context, refusal: str) -> tuple[int, ...]:
    """Return the tokens of an answer including the end of its turn."""
    turns = {"role": "user", "content": "?"}, {"role": "assistant", "content": refusal}
    row = encode(context.base.tokenizer, Example(turns, 1), UNBOUNDED)
    return tuple(label for label in row.labels if label != NO_LOSS)


def _report_progress(context: Context, done: int, total: int) -> None:
    context.report.activity(f"asking the base model about {total:,} rows", done, total)
    context.report.progress(done, total)
    context.raise_if_stopped()


def _refuse(context: Context, told: RowFindings) -> None:
    """Raise if the setting ends the run: `RowsQuarantined` or `TooManyRowsDropped`."""
    record, lines = told.record, [each.line for each in told.flagged if each.is_acted_on]
    if record.action == "quarantine" and lines:
        raise RowsQuarantined(
            f"{summary_text(record)}, and the provider has to look at them: {named_lines(lines)}", _FILE
        )
    most = context.run.row_signal.max_dropped
    if record.dropped and (record.dropped > most * record.rows or record.dropped == record.rows):
        count = f"; {record.dropped}" if record.judge else " and"
        whole = f"{summary_text(record)}{count} would not be trained on; at most {most:.0%} may be left out"
        raise TooManyRowsDropped(f"{whole}: {named_lines(lines)}", _FILE)
