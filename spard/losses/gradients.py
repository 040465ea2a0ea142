"""Gradients of the losses; the only module that runs a backward pass.

A training step gets closures over these functions: `ValueAndGrad` for the task loss, whose gradient is always needed,
and `Losses` for the safe losses, whose gradient is computed only if a method asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from spard import distributed
from spard.data.batches import Batch, to_device
from spard.errors import NonFiniteLoss
from spard.losses.cross_entropy import losses_and_states, token_losses
from spard.losses.relative import (
    METRICS,
    Reference,
    dpo_losses,
    pair_logps,
    row_means,
    token_divergences,
    weighted_losses,
)
from spard.losses.vectors import Vector, add_, shorten_
from spard.models.sharding import Shards


class Gradient(NamedTuple):
    """A loss, its clipped gradient, the norm before clipping, the token accuracy, and further metrics by name."""

    loss: float
    grad: Vector
    norm: float
    accuracy: float
    more: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Unread:
    """A gradient whose numbers are still on the device, so that a step copies all of them to the CPU at once.

    grad     the clipped gradient.
    numbers  the loss, the accuracy, then one number for each of `names`.
    norm     the gradient's norm before clipping.
    names    names of further metrics.
    """

    grad: Vector
    numbers: Tensor
    norm: Tensor
    names: tuple[str, ...] = ()

    def read(self) -> Gradient:
        """Copy the numbers to the CPU and return the gradient with them."""
        return self.read_all()[0]

    def read_all(self, *others: Tensor) -> tuple[Gradient, list[float]]:
        """Return the gradient, and the scalars `others` as floats, all copied to the CPU in one transfer."""
        loss, accuracy, *rest = torch.cat([self.numbers, torch.stack([self.norm, *others])]).tolist()
        more = dict(zip(self.names, rest, strict=False))
        length, *read = rest[len(self.names) :]
        return Gradient(loss, self.grad, length, accuracy, more), read


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss with its graph; the gradient is computed only by `grad`, which may be called once.

    value   the mean over all ranks, in nats per token.
    scalar  this rank's part of that mean, with a graph.
    theta   the parameters to differentiate by.
    weight  total weight of the mean, over all ranks: tokens or rows.
    again   for a batch in several passes, which keep no graph: recomputes each pass's part, one at a time.
    """

    value: float
    scalar: Tensor
    theta: Vector
    weight: float = 1.0
    again: Callable[[], Iterator[Tensor]] | None = None

    def grad(self) -> Vector:
        """Return dL/dtheta summed over all ranks; call it once, before theta changes."""
        total: Vector = []
        for part in self.again() if self.again else [self.scalar]:
            total = _sum(total, gradient(part, self.theta))
        distributed.sum_(_remaining_gradient(total, self.theta))
        return total


ValueAndGrad: TypeAlias = Callable[[], Gradient]
Losses: TypeAlias = Callable[[], Mapping[str, Loss]]


def gradient(loss: Tensor, theta: Vector) -> list[Tensor]:
    """Return the gradient of a scalar loss, one tensor per parameter; zeros for parameters that it does not depend on.

    If the parameters are sharded over ranks, it is this rank's shard of the gradient of the sum of all ranks' losses.
    """
    if isinstance(theta, Shards):
        return theta.gradient(loss)
    return list(torch.autograd.grad(loss, list(theta), allow_unused=True, materialize_grads=True))


def utility_gradient(
    model: Any,
    theta: Vector,
    pieces: Sequence[Batch],
    max_norm: float,
    references: Sequence[Tensor] = (),
) -> Unread:
    """Return a batch's mean loss over labeled tokens on all ranks, and its gradient clipped to `max_norm`.

    pieces      this rank's micro-batches; each is weighted by its tokens, so the cut does not change the result.
    references  token losses `[S]` of each micro-batch before training. If given, the gradient is that of constrained
                fine-tuning (`spard.losses.relative`); the reported loss is the unweighted one in any case.
    """
    tokens = to_device([sum(sum(piece.labels) for piece in pieces)], theta[0].device)[0]
    distributed.sum_([tokens])
    total: Vector = []
    sums = list[Tensor]()
    for i, piece in enumerate(pieces):
        losses = token_losses(model, piece)
        # `tokens` counts all ranks and micro-batches: with this divisor the sum of all gradients is that of the batch's
        # mean.
        loss_S = weighted_losses(losses, references[i]) if references else losses.loss_S
        total = _sum(total, gradient(loss_S.sum() / tokens, theta))
        sums.append(torch.stack([losses.loss_S.detach().sum() / tokens, losses.right_S.sum() / tokens]))
    plain = torch.stack(sums).sum(dim=0)
    distributed.sum_([*_remaining_gradient(total, theta), plain])
    return Unread(total, plain, shorten_(total, max_norm))


def preference_gradient(
    model: Any,
    theta: Vector,
    pieces: Sequence[Batch],
    max_norm: float,
    references: Sequence[Tensor],
    beta: float,
) -> Unread:
    """Return a batch's mean DPO loss over the pairs on all ranks, and its gradient clipped to `max_norm`.

    pieces      this rank's micro-batches, each with its rows in the order of `spard.losses.relative.stack_pairs`.
    references  log-probabilities `[P, 2]` of the pairs of each micro-batch under the reference model.
    beta        strength of the implicit reward.

    The accuracy is the token accuracy on the preferred answers.
    """
    pairs = [len(each) for each in references]
    # The first `count` rows of a micro-batch have the preferred answers (`stack_pairs`).
    own = [sum(piece.labels[:count]) for piece, count in zip(pieces, pairs, strict=True)]  # of the preferred answers
    counts = to_device([sum(pairs), sum(own)], theta[0].device)
    distributed.sum_([counts])
    total: Vector = []
    sums = list[Tensor]()
    for i, piece in enumerate(pieces):
        losses = token_losses(model, piece)
        found = dpo_losses(pair_logps(losses, piece, pairs[i]), references[i], beta)
        loss = found.loss_P.sum() / counts[0]
        total = _sum(total, gradient(loss, theta))
        right = losses.right_S[: own[i]].double().sum() / counts[1]
        sums.append(torch.cat([torch.stack([loss.detach(), right]), found.metrics_P6.sum(dim=0) / counts[0]]))
    plain = torch.stack(sums).sum(dim=0)
    distributed.sum_([*_remaining_gradient(total, theta), plain])
    return Unread(total, plain, shorten_(total, max_norm), METRICS)


def penalty_gradient(
    model: Any, theta: Vector, pieces: Sequence[Batch], penalties: Sequence[Callable[[Tensor], Tensor]]
) -> Vector:
    """Return the gradient of the summed penalties of all ranks; each penalty gets final hidden states `[B, T, D]`."""
    total: Vector = []
    for piece, penalty in zip(pieces, penalties, strict=True):
        total = _sum(total, gradient(penalty(losses_and_states(model, piece)[1]), theta))
    distributed.sum_(_remaining_gradient(total, theta))
    return total


def with_penalty(found: Unread, added: Vector, max_norm: float, max_ratio: float | None) -> Gradient:
    """Add a penalty's gradient to a task gradient and read the numbers; both gradients are changed in place.

    found      the task gradient; clipped to `max_norm` unless `max_ratio` is None.
    added      the penalty's gradient; it is shortened to at most `max_ratio` times the length of the task's.
    max_ratio  None: the sum is clipped to `max_norm` instead, so a long penalty leaves little of the task's gradient.

    Raises `NonFiniteLoss` if the penalty's gradient is not finite.
    """
    most = math.inf if max_ratio is None else max_ratio * found.norm.double().clamp(max=max_norm)
    length = shorten_(added, most)
    add_(found.grad, added)
    summed = found if max_ratio is not None else replace(found, norm=shorten_(found.grad, max_norm))
    gradient, (penalty,) = summed.read_all(length)
    if not math.isfinite(penalty):
        raise NonFiniteLoss("the gradient of the anchor is not finite; a lower learning rate may help")
    return gradient


def safe_losses(model: Any, theta: Vector, batch: Batch) -> dict[str, Loss]:
    """Return the mean loss over answer tokens ("mean") and over each answer's first tokens ("prefix").

    The means are over all ranks; a rank that got no row passes a batch without labels.
    """
    losses = token_losses(model, batch)
    every_S = torch.ones_like(losses.prefix_S)
    return means({"mean": (losses.loss_S, every_S), "prefix": (losses.loss_S, losses.prefix_S)}, theta)


def safe_divergence(model: Any, theta: Vector, batch: Batch, reference: Reference) -> dict[str, Loss]:
    """Return {"kl": mean over answer tokens on all ranks of KL(P_reference || P_model)}, in nats."""
    kl_S = token_divergences(model, reference, batch)
    return means({"kl": (kl_S, torch.ones_like(kl_S))}, theta)


def safe_excess(model: Any, theta: Vector, batch: Batch, base_N2: Tensor) -> dict[str, Loss]:
    """Return the losses of `safe_losses`, and how far rows are above the base model's losses on average.

    "excess" and "excess_prefix" are means over the rows on all ranks of [loss - base loss]_+, for the mean and the
    prefix loss. `base_N2` has the base losses of all N safe rows; `batch.rows` says which of these the batch has.
    """
    losses = token_losses(model, batch)
    every_S = torch.ones_like(losses.prefix_S)
    base_B2 = base_N2.index_select(0, to_device(batch.rows, base_N2.device)).to(losses.loss_S.device)
    # A rank without safe rows has one blank row in its batch but none in `batch.rows`; the slice drops it.
    above_B, above_prefix_B = (row_means(losses, batch)[: len(batch.rows)] - base_B2).clamp(min=0).unbind(dim=1)
    every_B = torch.ones_like(above_B)
    parts = {"mean": (losses.loss_S, every_S), "prefix": (losses.loss_S, losses.prefix_S)}
    return means(parts | {"excess": (above_B, every_B), "excess_prefix": (above_prefix_B, every_B)}, theta)


def means(parts: Mapping[str, tuple[Tensor, Tensor]], theta: Vector) -> dict[str, Loss]:
    """Return weighted means over all ranks by name; a part is this rank's losses and weights, both `[S]` or `[B]`."""
    weights = torch.stack([weight_S.sum() for _, weight_S in parts.values()])
    distributed.sum_([weights])
    scalars = [(loss_S * weight_S).sum() / weights[i] for i, (loss_S, weight_S) in enumerate(parts.values())]
    values = torch.stack(scalars).detach()
    distributed.sum_([values])
    told = torch.stack([values, weights.to(values)]).tolist()
    found = zip(parts, *told, scalars, strict=True)
    return {name: Loss(value, scalar, theta, weight) for name, value, weight, scalar in found}


def clip_(grad: Vector, max_norm: float) -> float:
    """Shorten a gradient in place to the norm `max_norm` if it is longer; return its original norm."""
    return float(shorten_(grad, max_norm))


def _remaining_gradient(grad: Vector, theta: Vector) -> Vector:
    """Return the tensors that are still to be summed over ranks; empty if sharding has summed them already."""
    return [] if isinstance(theta, Shards) else grad


def _sum(total: Vector, grad: Vector) -> Vector:
    if not total:
        return grad
    add_(total, grad)
    return total
