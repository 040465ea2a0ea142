"""The losses of one run as functions of its parameters and of row numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spard import distributed
from spard.config import Recipe, ResolvedNumbers, max_anchor_ratio
from spard.config.anchors import Anchors, Kind
from spard.data.batches import PASS, Batch, collate, cut, order, to_device
from spard.data.chat import EncodedSample
from spard.errors import InvalidRecipe
from spard.losses.anchor import Anchor, Pair, select_pairs, unlabeled_prompt
from spard.losses.cross_entropy import Evaluation, evaluate
from spard.losses.gradients import (
    Gradient,
    Loss,
    Unread,
    penalty_gradient,
    preference_gradient,
    utility_gradient,
    with_penalty,
)
from spard.losses.relative import base_losses, reference_losses, stack_pairs
from spard.losses.vectors import Vector
from spard.methods import Method
from spard.models.base import Base, disable_adapters
from spard.models.budget import Report, name_work
from spard.models.lora import dropping_modules

# The learning rate and the safe rows of a step, as functions of the step number alone.

SAFE_STREAM = 2  # random stream of the safe rows; `batches` uses 0 and 1


def schedule(step: int, total: int, warmup_ratio: float) -> float:
    """Return the learning rate at a step as a share of its peak: linear warm-up, then linear decay toward 0."""
    warmup = math.ceil(warmup_ratio * total)
    return (step + 1) / warmup if step < warmup else (total - step) / (total - warmup)


def anchor_pairs(seed: int, number: int, anchors: Anchors, numbers: Mapping[Kind, range]) -> list[int]:
    """Return the indices of a step's anchor pairs: the next pairs of each kind, in that kind's own random order."""
    drawn: list[int] = []
    for stream, (kind, (count, _)) in enumerate(anchors.by_kind().items(), SAFE_STREAM):
        of_kind = numbers.get(kind, range(0))
        drawn += [of_kind[i] for i in safe_rows(seed, number, len(of_kind), count, stream)]
    return drawn


def safe_rows(seed: int, number: int, n: int, size: int, stream: int = SAFE_STREAM) -> list[int]:
    """Return the indices of safe batch `number`: batches of `size` rows run through a new permutation in each epoch.

    `stream` selects an independent sequence of permutations, for rows of different kinds in the same step.
    """
    size = min(size, n)
    drawn = [divmod(number * size + i, n) for i in range(size)]
    epochs = {epoch: order(seed, epoch, n, stream) for epoch, _ in drawn}
    return [epochs[epoch][i] for epoch, i in drawn]


# The rows of a step that go through the model together, limited by padded tokens.
#
# The rows of a micro-batch are sorted by length and cut into the passes of lowest cost (`spard.data.batches`): then a
# long row of the pool does not pad a whole batch, nor a customer's long row the short ones. Prompts of the anchor
# have passes of their own, since the length of their gradient is bounded by the length of the task gradient
# (`spard.losses.gradients`).

LEAST = 1024  # padded tokens allowed in a pass even if the customer's rows are short


def plan_passes(numbers: Sequence[int], lengths: Sequence[int], most: int) -> list[list[int]]:
    """Return the row numbers of each pass, the pass with the longest rows first.

    `lengths` are the tokens of all rows by number. A pass has at most `most` padded tokens, unless it is a single row.
    """
    return [[numbers[i] for i in part] for part in cut([lengths[row] for row in numbers], most, PASS)]


def at_most(rows: Sequence[int], customer_rows: int, row_len: Sequence[int]) -> int:
    """Return the padded tokens of one pass over `rows` if each were as long as the customer's longest row.

    Rows from number `customer_rows` on are safe rows, whose length does not count. The result is at least `LEAST`.
    """
    return max(LEAST, len(rows) * max((row_len[row] for row in rows if row < customer_rows), default=0))


class Objective:
    """The task and safe rows of a run, and the gradients and losses that its method needs.

    Make it before the first step: references to the base model are computed in the constructor.
    """

    def __init__(
        self,
        base: Base,
        task: Sequence[EncodedSample],
        safe: Sequence[EncodedSample],
        recipe: Recipe,
        resolved: ResolvedNumbers,
        method: Method[Any],
        pairs: Mapping[Kind, Sequence[Pair]],
        report: Report | None = None,
    ) -> None:
        """Compute the references; `report` gets the progress of all that is computed before the first step."""
        self.base, self.safe, self.recipe, self.method = base, safe, recipe, method
        self.report = report
        self.plain = [row for row in safe if not row.is_variant]
        self.task, self.customer_rows = method.training_rows(task, safe), len(task)
        self.blank = unlabeled_prompt(self.task[0].ids[:2])  # input of a pass without rows
        self.lengths = [row.longest for row in self.task]
        self.safe_lengths = [row.longest for row in safe]
        self.reference_N2: Tensor | None = None  # of preference pairs; set by `set_reference`
        self.max_ratio = max_anchor_ratio(recipe, resolved, base.hidden_size)
        self.max_norm = float("inf") if method.clips_gradients else recipe.max_grad_norm
        self.dropping = dropping_modules(base.model)
        pad_id, anchored = base.tokenizer.pad_token_id, self._anchor_pairs(pairs)
        method.prepare(base, has_lora=recipe.lora is not None)
        if recipe.dpo and any(row.rejected is None for row in self.task):
            raise InvalidRecipe("recipe.dpo: there are rows to train on that are no preference pairs", "recipe.dpo")
        with disable_adapters(base.model):  # an adapter to start from is not part of the reference
            tell = name_work(report, "computing the base model's loss on the training rows")
            self.before = reference_losses(base.model, self.task, pad_id, tell) if recipe.constrained_sft else []
            weight, tell = recipe.effective_anchor, name_work(report, "computing the states that the anchor holds")
            self.anchor = Anchor(base.model, anchored, recipe.anchors, pad_id, weight, tell) if anchored else None
        self.prompt_lengths = [len(row.ids) for row in self.anchor.prompts] if self.anchor else []

    def anchors(self, step: int) -> list[int]:
        """Return the indices of the anchor pairs of a step; empty if the run has no anchor."""
        if self.anchor is None:
            return []
        return anchor_pairs(self.recipe.seed, step, self.recipe.anchors, self.anchor.numbers)

    def task_gradient(self, theta: Vector, rows: Sequence[int], anchors: Sequence[int] = ()) -> Gradient:
        """Return the task loss on some rows and its gradient, plus the anchor's gradient on some pairs.

        `rows` and `anchors` are numbers of the whole batch, the same on every rank; each rank computes its share, in
        micro-batches that fit in memory. Dropout is on.
        """
        self._set_dropout(True)
        if self.anchor is None or not anchors:
            return self._of_task(theta, rows, self.max_norm).read()
        found = self._of_task(theta, rows, self.max_norm if self.max_ratio is not None else math.inf)
        passes = _rank_passes(anchors, partial(self.anchor_passes, rows=rows))
        pieces = [self._batch([self.anchor.prompts[i] for i in each] or [self.blank]) for each in passes]
        penalties = [partial(self.anchor.penalty, each, anchors) for each in passes]
        added = penalty_gradient(self.base.model, theta, pieces, penalties)
        return with_penalty(found, added, self.max_norm, self.max_ratio)

    def set_reference(self, reference_N2: Tensor) -> None:
        """Set the reference log-probabilities of the preference pairs, `[N, 2]`.

        Required before the first DPO gradient.
        """
        self.reference_N2 = reference_N2

    def passes(self, rows: Sequence[int]) -> list[list[int]]:
        """Return the training rows of each pass, for some rows of one rank."""
        piece = self.recipe.micro_batch_size or max(1, len(rows))
        parts = [rows[i : i + piece] for i in range(0, len(rows), piece)]
        return [each for part in parts for each in plan_passes(part, self.lengths, self._most(part))]

    def anchor_passes(self, anchors: Sequence[int], rows: Sequence[int]) -> list[list[int]]:
        """Return the anchor pairs of each pass, in a step on the training rows `rows`."""
        piece = distributed.shares(rows)[0][: self.recipe.micro_batch_size]
        return plan_passes(anchors, self.prompt_lengths, self._most(piece))

    def safe_losses(self, theta: Vector, rows: Sequence[int]) -> Mapping[str, Loss]:
        """Return the method's safe losses by name, without dropout, on the safe rows `rows`, given for all ranks."""
        passes = _rank_passes(rows, self.safe_passes)
        pieces = [
            self._batch([self.safe[row] for row in each] or [self.blank])._replace(rows=tuple(each)) for each in passes
        ]
        return over_passes(partial(self._of_safe, theta), pieces)

    def safe_passes(self, rows: Sequence[int]) -> list[list[int]]:
        """Return the safe rows of each pass; all rows form one pass if they fit in memory."""
        most, micro = self.recipe.pass_tokens, self.recipe.micro_batch_size
        if most is None and micro is not None:
            most = max(LEAST, micro * max(self.lengths[: self.customer_rows]))
        whole = len(rows) * max((self.safe_lengths[row] for row in rows), default=0)
        return [list(rows)] if most is None or whole <= most else plan_passes(rows, self.safe_lengths, most)

    def base_losses(self) -> Tensor:
        """Return the base model's losses of each safe row, `[N, 2]`; call it while the model is the base model."""
        tell = name_work(self.report, "computing the base model's loss on each safe row")
        return base_losses(self.base.model, self.safe, self.base.tokenizer.pad_token_id, tell)

    def evaluate_plain(self) -> Evaluation:
        """Return the model's loss on the plain safe rows; call it while the model is the base model."""
        tell = name_work(self.report, "computing the base model's loss on safe rows")
        return evaluate(self.base.model, self.plain, self.base.tokenizer.pad_token_id, tell=tell)

    def _of_safe(self, theta: Vector, batch: Batch) -> Mapping[str, Loss]:
        """Return the method's safe losses on one micro-batch, without dropout."""
        self._set_dropout(False)
        return self.method.safe_losses(self.base.model, theta, batch)

    def _anchor_pairs(self, pairs: Mapping[Kind, Sequence[Pair]]) -> dict[Kind, Sequence[Pair]]:
        """Return the pairs of the kinds that the recipe uses; empty without an anchor."""
        return select_pairs(self.recipe.anchors, self.plain, pairs) if self.recipe.effective_anchor else {}

    def _of_task(self, theta: Vector, rows: Sequence[int], max_norm: float) -> Unread:
        """Return the task loss on some rows and its gradient clipped to `max_norm`; numbers stay on the device."""
        passes = _rank_passes(rows, self.passes)
        pieces = [self._batch(self._rows(each)) for each in passes]
        if self.recipe.dpo and self.reference_N2 is not None:
            logps, beta = (
                [to_device(self.reference_N2[each], self.base.device) for each in passes],
                self.recipe.dpo.strength,
            )
            return preference_gradient(self.base.model, theta, pieces, max_norm, logps, beta)
        references = [self._reference_states(each) for each in passes] if self.before else []
        return utility_gradient(self.base.model, theta, pieces, max_norm, references)

    def _most(self, rows: Sequence[int]) -> int:
        """Return the largest number of padded tokens in a pass."""
        return self.recipe.pass_tokens or at_most(rows, self.customer_rows, self.lengths)

    def _rows(self, one: Sequence[int]) -> list[EncodedSample]:
        """Return the encoded rows of a pass; one blank row if the pass is empty."""
        rows = [self.task[row] for row in one]
        return (stack_pairs(rows) if self.recipe.dpo else rows) or [self.blank]

    def _reference_states(self, one: Sequence[int]) -> Tensor:
        return torch.cat([self.before[row] for row in one]) if one else self.before[0][:0]

    def _set_dropout(self, on: bool) -> None:
        """Switch dropout on or off until the next call.

        A context manager would be wrong here: gradient checkpointing runs the forward pass again during the backward
        pass.
        """
        for module in self.dropping:
            module.training = on

    def _batch(self, rows: Sequence[EncodedSample]) -> Batch:
        return collate(rows, self.base.tokenizer.pad_token_id, self.base.device)


def _rank_passes(numbers: Sequence[int], cut: Callable[[Sequence[int]], list[list[int]]]) -> list[list[int]]:
    """Return this rank's passes, followed by empty ones until all ranks have the same number.

    With a sharded base model every rank must run the same number of passes, since each needs the others' weights.
    """
    plans = [cut(part) for part in distributed.shares(numbers)]
    own = plans[distributed.rank()]
    return own + [list[int]()] * (max(map(len, plans)) - len(own))


# Losses of a batch that is cut into several micro-batches.


def over_passes(losses: Callable[[Batch], Mapping[str, Loss]], pieces: Sequence[Batch]) -> Mapping[str, Loss]:
    """Return the means over a batch that is given in micro-batches; how it is divided does not change the result.

    With several micro-batches no graph is kept: `Loss.grad` computes each of them a second time, one after the other,
    so that the memory holds the graph of one. A single micro-batch keeps its graph.
    """
    if len(pieces) == 1:
        return losses(pieces[0])
    with torch.no_grad():
        found = [losses(piece) for piece in pieces]
    return {name: _join_losses(losses, pieces, [each[name] for each in found], name) for name in found[0]}


def _join_losses(
    losses: Callable[[Batch], Mapping[str, Loss]], pieces: Sequence[Batch], found: Sequence[Loss], name: str
) -> Loss:
    """Return the loss `name` over all micro-batches, from the losses `found` on each of them."""
    whole = sum(each.weight for each in found)
    shares = [each.weight / whole for each in found]

    def again() -> Iterator[Tensor]:
        for piece, share in zip(pieces, shares, strict=True):
            yield losses(piece)[name].scalar * share

    value = sum(share * each.value for share, each in zip(shares, found, strict=True))
    return Loss(value, found[0].scalar, found[0].theta, whole, again)
