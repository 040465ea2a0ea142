r"""DPO (Rafailov et al., 2023): make the preferred answer likelier than the rejected one, relative to a reference.

    r(y)  = beta (log P(y | x) - log P_reference(y | x))
    loss  = -log sigmoid(r(y_preferred) - r(y_rejected)),   averaged over pairs

log P(y | x) is the sum over the tokens of an answer, including its end token. The reference is the model before
training: the base model, or the adapter that the training starts from. Its log-probabilities never change, so they
are computed once. r is the implicit reward; its metrics are those of TRL.
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
    """The DPO loss `[P]` of the P pairs of a batch, and their metrics `[P, 6]` in the order of `METRICS`."""

    loss_P: Tensor
    metrics_P6: Tensor


def dpo_losses(logp_P2: Tensor, reference_P2: Tensor, beta: float) -> PairLosses:
    """Return the DPO loss of each pair from log P of its two answers, the preferred one in column 0."""
    reward_P2 = beta * (logp_P2 - reference_P2.to(logp_P2))
    margin_P = reward_P2[:, 0] - reward_P2[:, 1]
    metrics = [reward_P2, margin_P[:, None], (margin_P > 0).to(logp_P2.dtype)[:, None], logp_P2]
    return PairLosses(-logsigmoid(margin_P), torch.cat(metrics, dim=1).detach())


def stack_pairs(pairs: Sequence[Encoded]) -> list[Encoded]:
    """Return the 2P rows of P pairs: first all with the preferred answers, then all with the rejected ones."""
    return [pair.both[0] for pair in pairs] + [pair.both[-1] for pair in pairs]


def pair_logps(losses: TokenLosses, batch: Batch, pairs: int) -> Tensor:
    """Return both answers' log-probabilities `[P, 2]`; the batch begins with the 2P rows of `stack_pairs`.

    Tokens are summed in float64, so that a pair's loss does not depend on how its batch is padded or divided.
    """
    # The slice drops the blank row of a rank without pairs.
    return -batch.on_grid(losses.loss_S.double()).sum(dim=1)[: 2 * pairs].view(2, pairs).T


@torch.no_grad()
def reference_logps(model: Any, pairs: Sequence[Encoded], pad_id: int) -> Tensor:
    """Return the log-probabilities of both answers of each pair, `[N, 2]`, in float64 on the CPU, without dropout.

    The model's training mode is restored.
    """
    found_N2 = torch.zeros(len(pairs), 2, dtype=torch.float64)
    for places, losses, batch in _passes(model, pairs, pad_id):
        found_N2[places] = pair_logps(losses, batch, len(places)).cpu()
    return found_N2


@torch.no_grad()
def evaluate_pairs(model: Any, pairs: Sequence[Encoded], reference_N2: Tensor, beta: float, pad_id: int) -> Evaluation:
    """Return the mean DPO loss of pairs with dropout off, and the token accuracy on their preferred answers.

    `reference_N2` are the log-probabilities of `reference_logps`. The prefix loss of the result is the cross-entropy of
    the first tokens of the preferred answers.
    """
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
    """Yield the pair indices of each pass, their token losses and their batch, with dropout off."""
    device, was_training = next(model.parameters()).device, model.training
    model.eval()

    def batch_losses(places: list[int]) -> tuple[TokenLosses, Batch]:
        batch = collate(stack_pairs([pairs[i] for i in places]), pad_id, device)
        return token_losses(model, batch), batch

    for places, (losses, batch) in in_passes(model, [2 * pair.longest for pair in pairs], batch_losses):
        yield places, losses, batch
    model.train(was_training)
