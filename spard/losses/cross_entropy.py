"""Cross-entropy of labeled tokens; only positions with a label reach the output layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from spard.data.batches import Batch, collate
from spard.data.chat import EncodedSample
from spard.losses.vectors import wide
from spard.models.budget import Tell, in_passes
from spard.models.forward import final_states, ignore_packing

PREFIX = 4  # answer tokens bounded by the prefix constraint; the first ones decide between a refusal and an answer
_CHUNK = 2**27  # most logits in memory at once
_HEAD_EXTRAS = (  # settings of models that scale or cap the output of the head
    *("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"),
    *("logits_scaling", "logit_scale", "lm_head_multiplier", "logits_mup_width_multiplier"),
)


Head = Callable[[Tensor], Tensor]  # from the states of labeled tokens to their logits


class TokenLosses(NamedTuple):
    """Values of the S labeled tokens of a batch, row after row.

    loss_S    cross-entropy in nats.
    right_S   1 where the label has the largest logit, else 0.
    prefix_S  1 for the first `PREFIX` labeled tokens of each row, else 0.
    place_S   the token's place in the answer, from 1.
    """

    loss_S: Tensor
    right_S: Tensor
    prefix_S: Tensor  # 1 for the first tokens of each row's answer, else 0
    place_S: Tensor  # 1 for the first answer token of a row, 2 for the next


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Means over the labeled tokens of a data set; losses in nats per token, `accuracy` from 0 to 1."""

    loss: float
    prefix_loss: float
    accuracy: float
    tokens: int


def token_losses(model: Any, batch: Batch) -> TokenLosses:
    """Return the cross-entropy of each labeled token of a batch, in float32 at least.

    No padding mask is passed: padding is on the right, and causal attention does not see it.
    """
    return losses_and_states(model, batch)[0]


def losses_and_states(model: Any, batch: Batch) -> tuple[TokenLosses, Tensor]:
    """Return the token losses and the final hidden states of all tokens `[B, T, D]`, from one forward pass."""
    with mixed_precision(model):
        head, states_SD, hidden_BTD = labeled_states(model, batch)
        loss_S, right_S = in_chunks(partial(_score, head), vocabulary(model), states_SD, batch.label_S)
    return TokenLosses(loss_S, right_S, (batch.place_S <= PREFIX).float(), batch.place_S), hidden_BTD


@torch.no_grad()
def evaluate(
    model: Any, rows: Sequence[EncodedSample], pad_id: int, batch_tokens: int | None = None, tell: Tell | None = None
) -> Evaluation:
    """Return the mean loss and accuracy over `rows`, with dropout off; the model's training mode is restored.

    A pass has at most `batch_tokens` padded tokens; None: as many as fit in memory. `tell` gets the rows done and in
    all.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()

    def batch_losses(places: list[int]) -> TokenLosses:
        return token_losses(model, collate([rows[i] for i in places], pad_id, device))

    lengths = [len(row.ids) for row in rows]
    parts = [found for _, found in in_passes(model, lengths, batch_losses, batch_tokens, tell=tell)]
    model.train(was_training)
    # In float64: the order in which the passes come hardly changes the means.
    loss, right, prefix, _ = (torch.cat(column).double() for column in zip(*parts, strict=True))
    means = torch.stack([loss.mean(), (loss * prefix).sum() / prefix.sum(), right.mean()])
    mean, prefix_mean, accuracy = means.tolist()
    return Evaluation(mean, prefix_mean, accuracy, len(loss))


def mixed_precision(model: Any) -> AbstractContextManager[Any]:
    """Return a context that multiplies in bfloat16 on a GPU, and on a CPU where the model's first weights are bfloat16.

    Elsewhere it does nothing.
    """
    first = next(model.parameters())
    is_narrow = first.device.type == "cuda" or first.dtype == torch.bfloat16
    return torch.autocast(first.device.type, torch.bfloat16, enabled=is_narrow)


def labeled_states(model: Any, batch: Batch) -> tuple[Head, Tensor, Tensor]:
    """Return the head, its inputs for the labeled tokens `[S, D]`, and the final hidden states `[B, T, D]`.

    Some models scale or cap their logits after the head. For these the second item is the logits `[S, V]` themselves,
    and the head the identity.
    """
    config = model.config.get_text_config()
    if any(getattr(config, extra, None) not in (None, 1.0) for extra in _HEAD_EXTRAS):
        # Otherwise transformers reads the positions in every pass to look for packed rows, which waits for the GPU.
        with ignore_packing():
            found = model(input_ids=batch.ids_BT, use_cache=False, output_hidden_states=True)
        return _identity, _select_states(found.logits, batch.at_S), found.hidden_states[-1]
    hidden_BTD = final_states(model, batch.ids_BT)
    return model.get_output_embeddings(), _select_states(hidden_BTD, batch.at_S), hidden_BTD


def _select_states(states_BTD: Tensor, at_S: Tensor) -> Tensor:
    return states_BTD.flatten(0, 1).index_select(0, at_S)


def vocabulary(model: Any) -> int:
    """Return V, the width of the logits."""
    return int(model.config.get_text_config().vocab_size)


def in_chunks(score: Callable[..., tuple[Tensor, ...]], vocab: int, *columns: Tensor) -> tuple[Tensor, ...]:
    """Return `score(*columns)`, computed so that at most `_CHUNK` logits are in memory at once.

    Long batches are scored in chunks with gradient checkpointing: the backward pass recomputes each chunk's logits.
    """
    rows = max(1, _CHUNK // vocab)
    if len(columns[0]) <= rows:
        return score(*columns)
    chunks = zip(*(torch.split(column, rows) for column in columns), strict=True)
    parts = [checkpoint(score, *chunk, use_reentrant=False) for chunk in chunks]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _identity(logits_SV: Tensor) -> Tensor:
    return logits_SV


def _score(head: Head, hidden_SD: Tensor, label_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and 1 where the label has the largest logit."""
    logits_SV = head(hidden_SD)
    right_S = (logits_SV.detach().argmax(dim=1) == label_S).float()
    return cross_entropy(wide(logits_SV), label_S, reduction="none"), right_S
