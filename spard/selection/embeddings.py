"""Embeddings of texts by the base model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spard import distributed
from spard.data.batches import FORWARD, cut, to_device
from spard.data.control_tokens import Shield
from spard.models.base import Base, disable_adapters
from spard.models.budget import in_passes, pass_tokens
from spard.models.forward import ignore_packing
from spard.models.sharding import is_sharded

TEXT = 1  # version of which text is embedded and how it is cut; stored embeddings of another are not reused


def embedding_dtype(base: Base) -> torch.dtype:
    """Return the dtype of a base model's embeddings: that of its weights."""
    dtype: torch.dtype = next(base.model.parameters()).dtype
    return dtype


@torch.no_grad()
def embed(base: Base, texts: Sequence[str], max_tokens: int = 512, batch_tokens: int | None = None) -> Tensor:
    """Return phi(x) of each text, the mean over its tokens of the last hidden state, `[N, D]` on the CPU.

    texts         tokenized without the chat template; an empty text is embedded as the end token.
    max_tokens    longer texts are cut here.
    batch_tokens  padded tokens of a pass at most; None: as many as fit in memory.

    Means are taken in float32 and returned in the model's own dtype. Adapters are off. In a run on several ranks all
    call this with the same texts: each embeds its share, and all get the whole result.
    """
    decoder = base.model.get_decoder()
    out_ND = torch.zeros(len(texts), base.hidden_size, dtype=embedding_dtype(base))
    rows = _tokenize(base, texts, max_tokens)
    lengths = [len(row) for row in rows]
    most = min(
        distributed.gather_objects(batch_tokens or pass_tokens(base.model))
    )  # the same on all ranks, so that they divide the texts alike
    was_training = base.model.training
    base.model.eval()

    def means(places: list[int]) -> Tensor:
        return _mean_states(base, decoder, [rows[i] for i in places]).to(out_ND.dtype).cpu()

    with disable_adapters(base.model):
        for batch in distributed.rank_batches(cut(lengths, most, FORWARD)):
            if batch:
                for places, found_BD in in_passes(base.model, lengths, means, most, batch):
                    out_ND[places] = found_BD
            elif is_sharded(base.model):  # the other ranks' passes need this rank's shard
                _mean_states(base, decoder, [rows[0][:1]])
    base.model.train(was_training)
    distributed.sum_([out_ND])  # each row is on one rank, with zeros on the others
    return out_ND


def _tokenize(base: Base, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    if not texts:
        return []
    shield = Shield(base.tokenizer)
    plain = [shield.insert_spaces(text) for text in texts]
    rows = base.tokenizer(plain, truncation=True, max_length=max_tokens, verbose=False)["input_ids"]
    return [row or [base.tokenizer.eos_token_id] for row in rows]


def _mean_states(base: Base, decoder: torch.nn.Module, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the mean over each row's tokens `[B, D]`; causal attention ignores the padding on the right."""
    width, pad = max(len(row) for row in rows), base.tokenizer.pad_token_id
    ids_BT = to_device([[*row, *[pad] * (width - len(row))] for row in rows], base.device)
    length_B = to_device([len(row) for row in rows], base.device)
    is_real_BT = torch.arange(width, device=base.device) < length_B[:, None]
    with ignore_packing():
        states_BTD = decoder(input_ids=ids_BT, use_cache=False).last_hidden_state.float()
    mean_BD: Tensor = (states_BTD * is_real_BT[:, :, None]).sum(dim=1) / length_B[:, None]
    return mean_BD
