"""Embeddings of texts, by the base model or by a sentence encoder.

A sentence encoder gives the same vectors as `encode` of sentence-transformers. Its weights are loaded from safetensors
only, and no code from the model's folder is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel

from spard import distributed
from spard.data.batches import FORWARD, cut, to_device
from spard.data.control_tokens import Shield
from spard.errors import is_gpu_error, is_gpu_out_of_memory
from spard.models.base import Base, disable_adapters
from spard.models.budget import Tell, in_passes, pass_tokens
from spard.models.folder.encoder import EncoderLayout, Pooling, UnfitEmbedder, encoder_digest, read_encoder
from spard.models.forward import ignore_packing
from spard.models.sharding import is_sharded
from spard.models.stored_tokenizer import load_encoder_tokenizer

TEXT = 1  # version of which text is embedded and how it is cut; stored embeddings of another are not reused


def embedding_dtype(base: Base) -> torch.dtype:
    """Return the dtype of a base model's embeddings: that of its weights."""
    dtype: torch.dtype = next(base.model.parameters()).dtype
    return dtype


@torch.no_grad()
def embed(
    base: Base,
    texts: Sequence[str],
    max_tokens: int = 512,
    batch_tokens: int | None = None,
    tell: Tell | None = None,
) -> Tensor:
    """Return phi(x) of each text, the mean over its tokens of the last hidden state, `[N, D]` on the CPU.

    texts         tokenized without the chat template; an empty text is embedded as the end token.
    max_tokens    longer texts are cut here.
    batch_tokens  padded tokens of a pass at most; None: as many as fit in memory.
    tell          gets the texts that this rank has done, and all texts.

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
    done = 0

    def means(places: list[int]) -> Tensor:
        return _mean_states(base, decoder, [rows[i] for i in places]).to(out_ND.dtype).cpu()

    with disable_adapters(base.model):
        for batch in distributed.rank_batches(cut(lengths, most, FORWARD)):
            if batch:
                for places, found_BD in in_passes(base.model, lengths, means, most, batch):
                    out_ND[places] = found_BD
                    done += len(places)
                    if tell:
                        tell(done, len(texts))
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


ENCODER_PASS_TOKENS = 8192  # padded tokens of one pass
_LONGEST = 1 << 20  # tokenizers without a limit report a larger number


@dataclass(frozen=True, slots=True)
class Encoder:
    """A sentence encoder in memory; `digest` identifies its files, `name` its folder."""

    model: Any
    tokenizer: Any
    layout: EncoderLayout
    digest: str
    name: str

    @property
    def max_tokens(self) -> int:
        """The most tokens of a text, including its prompt and the special tokens."""
        asked = self.layout.max_tokens or int(self.tokenizer.model_max_length)
        positions = getattr(self.model.config, "max_position_embeddings", None)
        return min(asked, positions) if positions and positions > 0 else min(asked, _LONGEST)

    @property
    def dimensions(self) -> int:
        """The length of a vector."""
        width = int(self.model.config.hidden_size) * len(self.layout.pooling)
        return min(width, self.layout.dimensions or width)


def load_encoder(source: str | Path, device: torch.device | str | None = None) -> Encoder:
    """Load an encoder from a folder or, by its hub id, from the hub's cache or the hub.

    Weights are in float32 on a CPU, and in the dtype of the files on a GPU. Raises `UnfitEmbedder` if the encoder does
    not exist or cannot be loaded; GPU errors are raised as they are.
    """
    folder = encoder_folder(source)
    layout, digest = read_encoder(folder), encoder_digest(folder)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype: Any = "auto" if place.type == "cuda" else torch.float32
    try:
        tokenizer = load_encoder_tokenizer(Path(layout.transformer))
        model = AutoModel.from_pretrained(
            layout.transformer, dtype=dtype, use_safetensors=True, trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        if is_gpu_error(error) or is_gpu_out_of_memory(error):
            raise
        first = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise UnfitEmbedder(f"{folder.name} is no embedder: it cannot be loaded: {first}") from error
    tokenizer.padding_side = "right"
    return Encoder(model.eval().to(place), tokenizer, layout, digest, folder.name)


def encoder_folder(source: str | Path) -> Path:
    """Return the folder of an encoder; a hub id, org/name or org/name@commit, is downloaded first.

    Raises `UnfitEmbedder` if there is neither a folder nor an encoder of that id.
    """
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download  # slow to import
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    name, _, commit = str(source).partition("@")
    patterns = ["*.safetensors", "*.json", "*.model", "*.txt", "*/config.json"]
    try:
        return Path(snapshot_download(name, revision=commit or None, allow_patterns=patterns))
    except (OSError, ValueError, HFValidationError, HfHubHTTPError) as error:
        message = f"there is no folder {source}, and the hub has no encoder of that id that could be downloaded"
        raise UnfitEmbedder(f"{message}: name a folder or a hub id") from error


@torch.no_grad()
def encode(encoder: Encoder, texts: Sequence[str], tell: Tell | None = None) -> Tensor:
    """Return the vectors of texts as rows `[N, D]` in float32 on the CPU.

    `tell` gets the texts that this rank has done, and all texts.
    In a run on several ranks all call this with the same texts: each encodes its share, and all get the whole result.
    """
    rows, skipped = _encoder_tokens(encoder, texts)
    out_ND, done = torch.zeros(len(rows), encoder.dimensions), 0
    for places in distributed.rank_batches(cut([len(row) for row in rows], ENCODER_PASS_TOKENS, FORWARD)):
        if places:
            out_ND[places] = _vectors(encoder, [rows[i] for i in places], skipped).cpu()
            done += len(places)
            if tell:
                tell(done, len(rows))
    distributed.sum_([out_ND])  # each row is on one rank, with zeros on the others
    return out_ND


def _encoder_tokens(encoder: Encoder, texts: Sequence[str]) -> tuple[list[list[int]], int]:
    """Return the tokens of each text including its prompt, and the number of leading tokens that pooling skips."""
    if not texts:
        return [], 0
    layout, shield = encoder.layout, Shield(encoder.tokenizer)
    plain = [layout.prompt + shield.insert_spaces(text) for text in texts]
    if layout.lower_case:
        plain = [text.lower() for text in plain]
    options = {"truncation": True, "max_length": encoder.max_tokens, "verbose": False}
    rows: list[list[int]] = encoder.tokenizer(plain, **options)["input_ids"]
    empty = encoder.tokenizer.eos_token_id or encoder.tokenizer.pad_token_id or 0
    rows = [row or [empty] for row in rows]
    return rows, 0 if layout.includes_prompt or not layout.prompt else _prompt_tokens(encoder)


def _prompt_tokens(encoder: Encoder) -> int:
    """Return the number of tokens of the prompt, without the special token at the end of a text."""
    ids = encoder.tokenizer(encoder.layout.prompt, verbose=False)["input_ids"]
    return len(ids) - int(bool(ids) and ids[-1] in encoder.tokenizer.all_special_ids)


def _vectors(encoder: Encoder, rows: Sequence[Sequence[int]], skipped: int) -> Tensor:
    device, pad = encoder.model.device, encoder.tokenizer.pad_token_id or 0
    width = max(len(row) for row in rows)
    ids_BT = to_device([[*row, *[pad] * (width - len(row))] for row in rows], device)
    length_B = to_device([len(row) for row in rows], device)
    place_T = torch.arange(width, device=device)
    is_real_BT = place_T < length_B[:, None]
    states_BTD = encoder.model(input_ids=ids_BT, attention_mask=is_real_BT.long()).last_hidden_state.float()
    pooled_BT = is_real_BT & (place_T >= skipped) if skipped else is_real_BT
    parts = [_pool_states(mode, states_BTD, pooled_BT, length_B) for mode in encoder.layout.pooling]
    found_BD = torch.cat(parts, dim=1)
    if encoder.layout.normalizes:
        found_BD = torch.nn.functional.normalize(found_BD, dim=1)
    return found_BD[:, : encoder.dimensions]


def _pool_states(mode: Pooling, states_BTD: Tensor, pooled_BT: Tensor, length_B: Tensor) -> Tensor:
    """Return one vector for each text, `[B, D]`; `pooled_BT` marks the tokens that are pooled."""
    batch_B = torch.arange(len(length_B), device=states_BTD.device)
    if mode == "lasttoken":
        return states_BTD[batch_B, length_B - 1]
    if mode == "cls":
        return states_BTD[batch_B, pooled_BT.int().argmax(dim=1)]
    if mode == "max":
        return states_BTD.masked_fill(~pooled_BT[:, :, None], -torch.inf).amax(dim=1)
    weight_BT = pooled_BT.to(states_BTD.dtype)
    if mode == "weightedmean":
        weight_BT = weight_BT * torch.arange(1, weight_BT.shape[1] + 1, device=states_BTD.device)
    total_B = weight_BT.sum(dim=1, keepdim=True).clamp(min=1e-9)
    sum_BD = (states_BTD * weight_BT[:, :, None]).sum(dim=1)
    return sum_BD / (total_B.sqrt() if mode == "mean_sqrt_len_tokens" else total_B)
