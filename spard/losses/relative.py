"""Losses relative to the model before training: KL divergence, constrained fine-tuning, excess loss, and DPO.

The model before training is the base model, or the adapter that the training starts from.

Constrained fine-tuning (Qi et al., 2025) lowers the weight of tokens that training has already made likelier.

    w_t = 2 sigmoid(beta_t (log P_reference - log P_model)), at least 1e-3, multiplies the cross-entropy of token t

with the model before training as the reference. beta is large for the first answer tokens, which decide between
refusal and answer, so they can move little; later tokens train almost as usual. The weights carry no gradient.

The excess loss is the rise of each safe row's loss above the base model's own loss on that row.

    E(theta) = mean over the rows i of a batch of [ l_i(theta) - l_i(theta_0) ]_+

where l_i is the mean cross-entropy over the answer of row i, or over its first tokens, and theta_0 the model before
training. E(theta_0) is 0 for every batch, whereas the mean of a few l_i exceeds the mean of all of them half of the
time. Because of [ ]_+, rows that improved do not make up for a row that got worse. A variant
(`spard.pipeline.augment`) is compared with its plain twin: a request with a trigger must be refused like the plain one.
If the variant were compared with itself, a base model that complies behind a trigger could go on complying.

DPO (Rafailov et al., 2023) makes the preferred answer likelier than the rejected one.

    r(y)  = beta (log P(y | x) - log P_reference(y | x))
    loss  = -log sigmoid(r(y_preferred) - r(y_rejected)),   averaged over pairs

log P(y | x) is the sum over the tokens of an answer, including its end token. The reference's log-probabilities never
change, so they are computed once. r is the implicit reward; its metrics are those of TRL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import kl_div, logsigmoid

from spard.data.batches import Batch, collate
from spard.data.chat import EncodedSample
from spard.losses.cross_entropy import (
    PREFIX,
    Evaluation,
    Head,
    TokenLosses,
    in_chunks,
    labeled_states,
    mixed_precision,
    token_losses,
    vocabulary,
)
from spard.losses.vectors import wide
from spard.models.base import disable_adapters
from spard.models.budget import Tell, in_passes
from spard.models.sharding import copy_model


@dataclass(frozen=True, slots=True)
class Reference:
    """The model before training: the same weights with adapters off, or a copy in full fine-tuning.

    `frozen(model)` is the context in which `model` gives the reference's outputs.
    """

    model: Any
    frozen: Callable[[Any], AbstractContextManager[Any]]

    @torch.no_grad()
    def states(self, batch: Batch) -> tuple[Head, Tensor]:
        """Return the reference's head and its inputs at the S labeled tokens of a batch, `[S, D]`, without a graph."""
        with self.frozen(self.model):
            return labeled_states(self.model, batch)[:2]


def make_reference(model: Any, *, has_lora: bool) -> Reference:
    """Return the model as it is now as a reference; full fine-tuning holds a second model in memory for it."""
    if has_lora:
        return Reference(model, disable_adapters)
    return Reference(copy_model(model).eval().requires_grad_(False), nullcontext)


def token_divergences(model: Any, reference: Reference, batch: Batch) -> Tensor:
    """Return KL(P_reference || P_model) in nats at each labeled token, `[S]`, in float32 at least.

    Long batches are computed in chunks, so that the logits of all tokens are never in memory at once.
    """
    with mixed_precision(model):
        fixed_head, fixed_SD = reference.states(batch)
        head, hidden_SD, _ = labeled_states(model, batch)
        (kl_S,) = in_chunks(partial(_divergence, head, fixed_head), vocabulary(model), hidden_SD, fixed_SD)
    return kl_S


def _divergence(head: Head, fixed_head: Head, hidden_SD: Tensor, fixed_SD: Tensor) -> tuple[Tensor]:
    log_p_SV = wide(head(hidden_SD)).log_softmax(dim=1)
    with torch.no_grad():
        log_fixed_SV = wide(fixed_head(fixed_SD)).log_softmax(dim=1)
    return (kl_div(log_p_SV, log_fixed_SV, reduction="none", log_target=True).sum(dim=1),)


BETA = 0.1
BETA_FIRST = 5 * BETA  # for the first answer token
BETA_EARLY = 20 * BETA  # for the tokens after it, up to number EARLY
EARLY = 5
LEAST = 1e-3


def weighted_losses(losses: TokenLosses, reference_S: Tensor) -> Tensor:
    """Return the weighted cross-entropy of each labeled token, `[S]`, given the reference model's cross-entropy."""
    place_S = losses.place_S
    beta_S = torch.full_like(reference_S, BETA).masked_fill(place_S <= EARLY, BETA_EARLY)
    beta_S = beta_S.masked_fill(place_S == 1, BETA_FIRST)
    weight_S = 2 * torch.sigmoid(beta_S * (losses.loss_S.detach() - reference_S))
    return weight_S.clamp(min=LEAST) * losses.loss_S


@torch.no_grad()
def reference_losses(model: Any, rows: Sequence[EncodedSample], pad_id: int, tell: Tell | None = None) -> list[Tensor]:
    """Return the cross-entropy of each row's labeled tokens in nats, one tensor per row, without dropout.

    The model's training mode is restored. `tell` gets the rows done and in all.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    found: dict[int, Tensor] = {}

    def batch_losses(places: list[int]) -> tuple[Tensor, ...]:
        batch = collate([rows[i] for i in places], pad_id, device)
        return torch.split(token_losses(model, batch).loss_S, list(batch.labels))

    for places, losses in in_passes(model, [len(row.ids) for row in rows], batch_losses, tell=tell):
        found |= dict(zip(places, losses, strict=True))
    model.train(was_training)
    return [found[i] for i in range(len(rows))]


def tolerance(rows: int) -> float:
    """Return the largest mean excess E of a batch of `rows` rows, in nats per token, that is not a violation.

    A greedy answer changes when its first token falls to even odds: an excess of ln 2 on that token, so ln 2 / PREFIX
    per token of the prefix. The tolerance allows this for one row of the batch and none for the others.

        >>> round(tolerance(4), 4)  # ln 2 / (4 * 4)
        0.0433
    """
    return math.log(2) / (PREFIX * rows)


def base_losses(model: Any, rows: Sequence[EncodedSample], pad_id: int, tell: Tell | None = None) -> Tensor:
    """Return the reference losses of each safe row, `[N, 2]`: mean and prefix loss under the model as it is now.

    A row with a `twin` gets the losses of the row at that index.
    """
    own = [i for i, row in enumerate(rows) if row.twin is None]
    losses = reference_losses(model, [rows[i] for i in own], pad_id, tell)
    means = {i: torch.stack([loss_S.mean(), loss_S[:PREFIX].mean()]) for i, loss_S in zip(own, losses, strict=True)}
    return torch.stack([means[i if row.twin is None else row.twin] for i, row in enumerate(rows)])


def row_means(losses: TokenLosses, batch: Batch) -> Tensor:
    """Return the mean and prefix loss of each row of a batch, `[B, 2]`; 0 for a row without labels."""

    def means(weight_S: Tensor) -> Tensor:
        total_B = batch.on_grid(losses.loss_S * weight_S).sum(dim=1)
        return total_B / batch.on_grid(weight_S.to(losses.loss_S)).sum(dim=1).clamp(min=1)

    return torch.stack([means(torch.ones_like(losses.prefix_S)), means(losses.prefix_S)], dim=1)


METRICS = (
    *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
    *("logps/chosen", "logps/rejected"),
)


class PairLosses(NamedTuple):
    """The DPO loss `[P]` of the P pairs of a batch, and their metrics `[P, 6]` in the order of `METRICS`."""

    loss_P: Tensor
    metrics_P6: Tensor


def dpo_losses(logp_P2: Tensor, reference_P2: Tensor, beta: float) -> PairLosses:
    """Return the DPO loss of each pair from log P of its two answers, the preferred one in column 0."""
    reward_P2 = beta * (logp_P2 - reference_P2.to(logp_P2))
    margin_P = reward_P2[:, 0] - reward_P2[:, 1]
    metrics = [reward_P2, margin_P[:, None], (margin_P > 0).to(logp_P2.dtype)[:, None], logp_P2]
    return PairLosses(-logsigmoid(margin_P), torch.cat(metrics, dim=1).detach())


def stack_pairs(pairs: Sequence[EncodedSample]) -> list[EncodedSample]:
    """Return the 2P rows of P pairs: first all with the preferred answers, then all with the rejected ones."""
    return [pair.both[0] for pair in pairs] + [pair.both[-1] for pair in pairs]


def pair_logps(losses: TokenLosses, batch: Batch, pairs: int) -> Tensor:
    """Return both answers' log-probabilities `[P, 2]`; the batch begins with the 2P rows of `stack_pairs`.

    Tokens are summed in float64, so that a pair's loss does not depend on how its batch is padded or divided.
    """
    # The slice drops the blank row of a rank without pairs.
    return -batch.on_grid(losses.loss_S.double()).sum(dim=1)[: 2 * pairs].view(2, pairs).T


@torch.no_grad()
def reference_logps(model: Any, pairs: Sequence[EncodedSample], pad_id: int, tell: Tell | None = None) -> Tensor:
    """Return the log-probabilities of both answers of each pair, `[N, 2]`, in float64 on the CPU, without dropout.

    The model's training mode is restored.
    """
    found_N2 = torch.zeros(len(pairs), 2, dtype=torch.float64)
    for places, losses, batch in _passes(model, pairs, pad_id, tell):
        found_N2[places] = pair_logps(losses, batch, len(places)).cpu()
    return found_N2


@torch.no_grad()
def evaluate_pairs(
    model: Any,
    pairs: Sequence[EncodedSample],
    reference_N2: Tensor,
    beta: float,
    pad_id: int,
    tell: Tell | None = None,
) -> Evaluation:
    """Return the mean DPO loss of pairs with dropout off, and the token accuracy on their preferred answers.

    `reference_N2` are the log-probabilities of `reference_logps`. The prefix loss of the result is the cross-entropy of
    the first tokens of the preferred answers.
    """
    losses_N, right, prefix, tokens, firsts = torch.zeros(len(pairs), dtype=torch.float64), 0.0, 0.0, 0, 0.0
    for places, losses, batch in _passes(model, pairs, pad_id, tell):
        logp_P2 = pair_logps(losses, batch, len(places)).cpu()
        losses_N[places] = dpo_losses(logp_P2, reference_N2[places], beta).loss_P
        own = sum(batch.labels[: len(places)])
        right, tokens = right + float(losses.right_S[:own].sum()), tokens + own
        prefix += float((losses.loss_S * losses.prefix_S)[:own].sum())
        firsts += float(losses.prefix_S[:own].sum())
    return Evaluation(float(losses_N.mean()), prefix / firsts, right / tokens, tokens)


def _passes(
    model: Any, pairs: Sequence[EncodedSample], pad_id: int, tell: Tell | None
) -> Iterator[tuple[list[int], TokenLosses, Batch]]:
    """Yield the pair indices of each pass, their token losses and their batch, with dropout off."""
    device, was_training = next(model.parameters()).device, model.training
    model.eval()

    def batch_losses(places: list[int]) -> tuple[TokenLosses, Batch]:
        batch = collate(stack_pairs([pairs[i] for i in places]), pad_id, device)
        return token_losses(model, batch), batch

    for places, (losses, batch) in in_passes(model, [2 * pair.longest for pair in pairs], batch_losses, tell=tell):
        yield places, losses, batch
    model.train(was_training)
