"""The duration and the amount of work of each stage, reported at its end; estimates for later jobs are based on them.

stage         its unit
rows          rows of the training file that were read and checked
row_signal    rows whose own refusal the base model was asked for
embed         rows that were embedded, including the safety pool's if its embeddings were not cached
select        rows of the training file for which safe rows were selected
base_audit    replies of the base model
evidence      steps of the probe; the time includes measuring its prompts before and after
task          replies of both models to the customer's held-out requests
train         trained tokens of the customer's rows; the time excludes the work at ends of epochs
checkpoint    replies at the ends of epochs
compare       ends of epochs that were compared
audit         replies of the last audit, including those of a second look
package       1
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from spard.pipeline.context import Context
from spard.training.train import TrainedModel

_INSIDE_ROWS = ("row_signal", "embed", "select")
_INSIDE_TRAINING = ("checkpoints", "compare")


@contextmanager
def counted_replies(context: Context, stage: str) -> Iterator[None]:
    """Report the duration of the block, and the number of replies that were counted inside it."""
    started, before = time.perf_counter(), context.report.count_afresh()
    yield
    context.report.cost(stage, time.perf_counter() - started, context.report.counted - before)


@contextmanager
def timed_rows(context: Context) -> Iterator[list[int]]:
    """Report the durations of reading the rows and of the stages within it; append the number of rows to the list."""
    started, before, counts = time.perf_counter(), dict(context.seconds), list[int]()
    yield counts
    seconds, rows = time.perf_counter() - started, sum(counts)
    for stage in _INSIDE_ROWS:
        if took := context.seconds.get(stage, 0.0) - before.get(stage, 0.0):
            seconds -= took
            context.report.cost(stage, took, max(rows, context.counts[stage]) if stage == "embed" else rows)
    context.report.cost("rows", seconds, rows)


@contextmanager
def timed_training(context: Context) -> Iterator[list[TrainedModel]]:
    """Report the duration of training and its tokens; append the `TrainedModel` result to the list.

    If training resumed from an earlier attempt, the tokens are scaled to this attempt's share of the steps' seconds.
    """
    started, before, found = time.perf_counter(), dict(context.seconds), list[TrainedModel]()
    yield found
    inside = sum(context.seconds.get(stage, 0.0) - before.get(stage, 0.0) for stage in _INSIDE_TRAINING)
    seconds = time.perf_counter() - started - inside
    for trained in found:
        # `trained` covers all attempts of a resumed training, the seconds measured here only this one.
        share = min(1.0, seconds / trained.seconds) if trained.seconds else 1.0
        context.report.cost("train", seconds, round(share * trained.trained_tokens))
