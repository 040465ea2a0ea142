"""Gradients of the losses; the only file that runs a backward pass.

A training step sees closures of these functions: `ValueAndGrad` for the utility loss, whose gradient is always needed,
and `Losses` for the safe losses, whose gradient is computed only when a method asks for it.
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
from spard.losses.constrained_sft import weighted_losses
from spard.losses.cross_entropy import losses_and_states, token_losses
from spard.losses.excess import row_means
from spard.losses.kl import Reference, token_divergences
from spard.losses.preference import METRICS, dpo_losses, pair_logps
from spard.losses.vectors import Vector, add_, shorten_
from spard.models.sharding import Shards


class Gradient(NamedTuple):
    """A loss, its clipped gradient and the gradient's norm before clipping; `more` are metrics of the loss's own."""

    loss: float
    grad: Vector
    norm: float
    accuracy: float
    more: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Unread:
    """A gradient whose numbers are still on its device, so that all of a step are read at once.

    numbers  the loss, the accuracy, then those that `names` names
    norm     before clipping
    """

    grad: Vector
    numbers: Tensor
    norm: Tensor
    names: tuple[str, ...] = ()

    def read(self) -> Gradient:
        """Read the numbers."""
        return self.read_all()[0]

    def read_all(self, *others: Tensor) -> tuple[Gradient, list[float]]:
        """Read the numbers, and others in the same go."""
        loss, accuracy, *rest = torch.cat([self.numbers, torch.stack([self.norm, *others])]).tolist()
        more = dict(zip(self.names, rest, strict=False))
        length, *read = rest[len(self.names) :]
        return Gradient(loss, self.grad, length, accuracy, more), read


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss with its graph; `grad` runs the backward pass, once.

    In a run on several processes `value` is that of all rows and `scalar` this process's part of it. `weight` is that
    of all rows in a mean over further ones. `again` is of a batch that went through in several passes, without graphs:
    it makes the part of each pass anew, one at a time.
    """

    value: float
    scalar: Tensor
    theta: Vector
    weight: float = 1.0
    again: Callable[[], Iterator[Tensor]] | None = None

    def grad(self) -> Vector:
        """Return dL/dtheta summed over all processes, while theta is as it was; the graph is gone afterward."""
        total: Vector = []
        for part in self.again() if self.again else [self.scalar]:
            total = _sum(total, gradient(part, self.theta))
        distributed.sum_(_remaining_gradient(total, self.theta))
        return total


ValueAndGrad: TypeAlias = Callable[[], Gradient]
Losses: TypeAlias = Callable[[], Mapping[str, Loss]]


def gradient(loss: Tensor, theta: Vector) -> list[Tensor]:
    """Return the gradient of a loss; parameters that it does not depend on get zeros.

    Of parameters that are cut over ranks it is this rank's part of the gradient of the losses' sum over all.
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
    """Return the mean loss over all labeled tokens of a batch, and its gradient clipped to `max_norm`.

    Each piece is weighted by its tokens, so the result does not depend on how the batch was cut. With `references`,
    the token losses of each piece before training, the gradient is that of the constrained loss. The loss told is the
    plain one.
    """
    tokens = to_device([sum(sum(piece.labels) for piece in pieces)], theta[0].device)[0]
    distributed.sum_([tokens])
    total: Vector = []
    sums = list[Tensor]()
    for i, piece in enumerate(pieces):
        losses = token_losses(model, piece)
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
    """Return the mean DPO loss over all pairs of a batch, and its gradient clipped to `max_norm`.

    The rows of each piece are its pairs as `spard.losses.preference.stack_pairs` puts them; `references` are the P x 2
    log-probabilities of its pairs under the reference. Accuracy is that of the preferred answers' tokens.
    """
    pairs = [len(each) for each in references]
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
    """Return the gradient of the sum of penalties over all processes, each on the final hidden states of its piece."""
    total: Vector = []
    for piece, penalty in zip(pieces, penalties, strict=True):
        total = _sum(total, gradient(penalty(losses_and_states(model, piece)[1]), theta))
    distributed.sum_(_remaining_gradient(total, theta))
    return total


def with_penalty(found: Unread, added: Vector, max_norm: float, max_ratio: float | None) -> Gradient:
    """Read a task gradient that was clipped to `max_norm`, with a penalty's gradient added, both used up.

    The penalty's is shortened to `max_ratio` times the task's own length. None: the task's was not clipped, and the sum
    is; a penalty with a long gradient then leaves little of the task's. Raise NonFiniteLoss if the penalty's gradient
    is not finite.
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
    """Return the token mean ("mean") and the mean over each answer's first tokens ("prefix"), from one forward pass.

    A batch without labels is the share of a process that got no row.
    """
    losses = token_losses(model, batch)
    every_S = torch.ones_like(losses.prefix_S)
    return means({"mean": (losses.loss_S, every_S), "prefix": (losses.loss_S, losses.prefix_S)}, theta)


def safe_divergence(model: Any, theta: Vector, batch: Batch, reference: Reference) -> dict[str, Loss]:
    """Return the mean over answer tokens of KL(P_reference || P_model) ("kl")."""
    kl_S = token_divergences(model, reference, batch)
    return means({"kl": (kl_S, torch.ones_like(kl_S))}, theta)


def safe_excess(model: Any, theta: Vector, batch: Batch, base_N2: Tensor) -> dict[str, Loss]:
    """Return the losses of `safe_losses` and how far each row is above its mean and prefix loss before, in `base_N2`.

    "excess" and "excess_prefix" are means over the rows of how far above, 0 for a row that is not; `base_N2` has an
    entry for each of all safe rows, and the batch names its own.
    """
    losses = token_losses(model, batch)
    every_S = torch.ones_like(losses.prefix_S)
    base_B2 = base_N2.index_select(0, to_device(batch.rows, base_N2.device)).to(losses.loss_S.device)
    above_B, above_prefix_B = (row_means(losses, batch)[: len(batch.rows)] - base_B2).clamp(min=0).unbind(dim=1)
    every_B = torch.ones_like(above_B)
    parts = {"mean": (losses.loss_S, every_S), "prefix": (losses.loss_S, losses.prefix_S)}
    return means(parts | {"excess": (above_B, every_B), "excess_prefix": (above_prefix_B, every_B)}, theta)


def means(parts: Mapping[str, tuple[Tensor, Tensor]], theta: Vector) -> dict[str, Loss]:
    """Weighted means over the tokens of all processes; each part is this process's token losses and their weights."""
    weights = torch.stack([weight_S.sum() for _, weight_S in parts.values()])
    distributed.sum_([weights])
    scalars = [(loss_S * weight_S).sum() / weights[i] for i, (loss_S, weight_S) in enumerate(parts.values())]
    values = torch.stack(scalars).detach()
    distributed.sum_([values])
    told = torch.stack([values, weights.to(values)]).tolist()
    found = zip(parts, *told, scalars, strict=True)
    return {name: Loss(value, scalar, theta, weight) for name, value, weight, scalar in found}


def clip_(grad: Vector, max_norm: float) -> float:
    """Shorten a gradient to `max_norm`; its norm before."""
    return float(shorten_(grad, max_norm))


def _remaining_gradient(grad: Vector, theta: Vector) -> Vector:
    """Return what of a gradient is still to be summed over the ranks."""
    return [] if isinstance(theta, Shards) else grad


def _sum(total: Vector, grad: Vector) -> Vector:
    if not total:
        return grad
    add_(total, grad)
    return total
