"""What each stage of a run took and how much it worked on, told when it has ended: estimates of later jobs rest on it.

stage         its unit
rows          rows of the training file that were read and checked
row_signal    likewise, that the base model was asked about
embed         likewise, that were embedded, the safety pool's too where that was not known
select        likewise, of which safe rows were selected
base_audit    replies of the base model
task          replies to requests of the customer's that show whether the task is learned, of both models
train         tokens of the customer's rows, without what ends of epochs took
checkpoint    replies at the ends of epochs
compare       ends of epochs that were compared
audit         replies of the last audit, those of a second look too
package       1
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from spard.pipeline.context import Context
from spard.training.train import Trained

_INSIDE_ROWS = ("row_signal", "embed", "select")
_INSIDE_TRAINING = ("checkpoints", "compare")


@contextmanager
def counted_replies(context: Context, stage: str) -> Iterator[None]:
    """Tell what the block took, and how many replies it has told of as its progress."""
    started, before = time.perf_counter(), context.report.count_afresh()
    yield
    context.report.cost(stage, time.perf_counter() - started, context.report.counted - before)


@contextmanager
def timed_rows(context: Context) -> Iterator[list[int]]:
    """Tell what reading the rows took, and the stages inside of it; their number is put into the list."""
    started, before, counts = time.perf_counter(), dict(context.seconds), list[int]()
    yield counts
    seconds, rows = time.perf_counter() - started, sum(counts)
    for stage in _INSIDE_ROWS:
        if took := context.seconds.get(stage, 0.0) - before.get(stage, 0.0):
            seconds -= took
            context.report.cost(stage, took, max(rows, context.counts[stage]) if stage == "embed" else rows)
    context.report.cost("rows", seconds, rows)


@contextmanager
def timed_training(context: Context) -> Iterator[list[Trained]]:
    """Tell what training took, and of how many tokens; what it gave is put into the list.

    Of one that went on from an earlier attempt only this attempt's share of the steps' seconds counts.
    """
    started, before, found = time.perf_counter(), dict(context.seconds), list[Trained]()
    yield found
    inside = sum(context.seconds.get(stage, 0.0) - before.get(stage, 0.0) for stage in _INSIDE_TRAINING)
    seconds = time.perf_counter() - started - inside
    for trained in found:
        share = min(1.0, seconds / trained.seconds) if trained.seconds else 1.0
        context.report.cost("train", seconds, round(share * trained.trained_tokens))
