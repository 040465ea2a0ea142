"""The harm that the run's judge finds in training rows that are not flagged.

The row signal misses harm in a disguise that the base model obeys; the judge does not. The judge reads the rows that
are likeliest to be harmful first, in rounds, until harm is as rare as the judge's own errors.
"""

from __future__ import annotations

from collections.abc import Sequence

from spard import distributed
from spard.data.rows import Example, prompt_text
from spard.evaluation.active_learning import ReadingOrder
from spard.evaluation.calibration.errors import MAX_ERROR
from spard.evaluation.judged_rows import RowVerdict, judged_rows
from spard.evaluation.judges.base import Judge
from spard.pipeline.context import Context
from spard.pipeline.judge_false_positives import may_read_harmless
from spard.pipeline.row_judging import Flagged, may_be_asked, may_decide, readable

ROUND = 64  # rows to read before ranking the others again


def judge_unflagged(
    context: Context, examples: Sequence[Example], flagged: Sequence[Flagged], judge: Judge, pool: Sequence[Example]
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
