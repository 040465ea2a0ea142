r"""DPO (Rafailov et al., 2023): the preferred answer becomes likelier than the other one, measured from a reference.

    r(y)  = beta (log P(y | x) - log P_reference(y | x))
    loss  = -log sigmoid(r(y_preferred) - r(y_rejected)),   in the mean over pairs

log P(y | x) is the sum over the tokens of an answer, its end included. The reference is the model before training: the
base model, or the adapter that the training goes on from; what it gives does not change, so it is computed once. r is
the implicit reward, reported as TRL does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from spard.data.batches import Batch, collate
from spard.data.chat import Encoded
from spard.losses.cross_entropy import Evaluation, TokenLosses, token_losses
from spard.models.budget import in_passes

METRICS = (
    *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
    *("logps/chosen", "logps/rejected"),
)


class PairLosses(NamedTuple):
    """One entry for each of the P pairs of a batch; `metrics_P6` are those of `METRICS`."""

    loss_P: Tensor
    metrics_P6: Tensor


def dpo_losses(logp_P2: Tensor, reference_P2: Tensor, beta: float) -> PairLosses:
    """Return the loss of each pair from the log-probabilities of its preferred and of its other answer."""
    reward_P2 = beta * (logp_P2 - reference_P2.to(logp_P2))
    margin_P = reward_P2[:, 0] - reward_P2[:, 1]
    metrics = [reward_P2, margin_P[:, None], (margin_P > 0).to(logp_P2.dtype)[:, None], logp_P2]
    return PairLosses(-logsigmoid(margin_P), torch.cat(metrics, dim=1).detach())


def stack_pairs(pairs: Sequence[Encoded]) -> list[Encoded]:
    """Return the rows of a batch of P pairs: all with the preferred answers, then all with the others."""
    return [pair.both[0] for pair in pairs] + [pair.both[-1] for pair in pairs]


def pair_logps(losses: TokenLosses, batch: Batch, pairs: int) -> Tensor:
    """Return the log-probabilities of both answers, P x 2, of a batch that begins with `pairs` pairs `stack_pairs`.

    Tokens are summed in float64, so that a pair's loss does not depend on how its batch is padded or divided.
    """
    return -batch.on_grid(losses.loss_S.double()).sum(dim=1)[: 2 * pairs].view(2, pairs).T


@torch.no_grad()
def reference_logps(model: Any, pairs: Sequence[Encoded], pad_id: int) -> Tensor:
    """Return the log-probabilities of both answers of each pair, N x 2, without dropout; the model's mode is restored.

    They are in float64, on the CPU.
    """
    found_N2 = torch.zeros(len(pairs), 2, dtype=torch.float64)
    for places, losses, batch in _passes(model, pairs, pad_id):
        found_N2[places] = pair_logps(losses, batch, len(places)).cpu()
    return found_N2


@torch.no_grad()
def evaluate_pairs(model: Any, pairs: Sequence[Encoded], reference_N2: Tensor, beta: float, pad_id: int) -> Evaluation:
    """Mean DPO loss of pairs with dropout off, and the token accuracy on their preferred answers."""
    losses_N, right, prefix, tokens, firsts = torch.zeros(len(pairs), dtype=torch.float64), 0.0, 0.0, 0, 0.0
    for places, losses, batch in _passes(model, pairs, pad_id):
        logp_P2 = pair_logps(losses, batch, len(places)).cpu()
        losses_N[places] = dpo_losses(logp_P2, reference_N2[places], beta).loss_P
        own = sum(batch.labels[: len(places)])
        right, tokens = right + float(losses.right_S[:own].sum()), tokens + own
        prefix += float((losses.loss_S * losses.prefix_S)[:own].sum())
        firsts += float(losses.prefix_S[:own].sum())
    return Evaluation(float(losses_N.mean()), prefix / firsts, right / tokens, tokens)


def _passes(model: Any, pairs: Sequence[Encoded], pad_id: int) -> Iterator[tuple[list[int], TokenLosses, Batch]]:
    """Yield the places of some pairs, their token losses and their batch, until all pairs were looked at."""
    device, was_training = next(model.parameters()).device, model.training
    model.eval()

    def batch_losses(places: list[int]) -> tuple[TokenLosses, Batch]:
        batch = collate(stack_pairs([pairs[i] for i in places]), pad_id, device)
        return token_losses(model, batch), batch

    for places, (losses, batch) in in_passes(model, [2 * pair.longest for pair in pairs], batch_losses):
        yield places, losses, batch
    model.train(was_training)
