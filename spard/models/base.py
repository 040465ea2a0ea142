"""Loads base models from a folder or the hub: safetensors only, and never a model's own code."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.peft_utils import find_adapter_config_file

from spard.config import MAX_SEQ_LENGTH, Quantization, Sharding
from spard.config.quantization import quantized_digest
from spard.data.chat import ask_in_mode, set_plain_template
from spard.data.rendering import Mode
from spard.digests import MANIFEST, file_sha256, folder_digest
from spard.errors import UnfitModel
from spard.models import loaded, nf4
from spard.models.folder.check import fault
from spard.models.folder.vocabulary import unknown_id
from spard.models.origin import Origin, origin
from spard.models.peft import BaseTunerLayer
from spard.models.sharding import shard_

_CACHE = "past_key_values"  # transformers' argument for the key-value cache


@dataclass(frozen=True, slots=True)
class Base:
    """A base model, its tokenizer and the digest of exactly these bytes."""

    model: Any
    tokenizer: Any
    digest: str
    device: torch.device
    origin: Origin
    quantization: Quantization = "none"
    stored: str | None = None  # `fp8` or `mxfp4`: the format of the files, whose weights were dequantized

    @property
    def hidden_size(self) -> int:
        """D, the width of the final hidden states (of the text part, if the model also sees images)."""
        return int(self.model.config.get_text_config().hidden_size)

    def unknown_id(self, ids: Iterable[int]) -> int | None:
        """Return the largest of the token ids if it has no embedding, else None."""
        return unknown_id(ids, int(self.model.get_input_embeddings().weight.shape[0]))

    def sequence_limit(self, asked: int | None) -> int:
        """Return the maximum tokens of a training row: `asked` or the default, at most the model's positions."""
        positions = int(getattr(self.model.config.get_text_config(), "max_position_embeddings", MAX_SEQ_LENGTH))
        return min(positions, asked or MAX_SEQ_LENGTH)


def load_base(
    source: str | Path,
    revision: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    as_stored: bool = False,
    sharding: Sharding = "none",
    quantization: Quantization = "none",
    sha256: Callable[[Path], str] = file_sha256,
) -> Base:
    """Load a causal language model onto its device; `source` is a folder or a hub id.

    With `sharding` each rank keeps only its shard. Loading uses no random numbers. On a GPU, cuDNN attention is
    disabled for the whole process: it compiles a plan for each new shape, and replies have many shapes. See `read_base`
    for the other arguments and the errors.

        base = load_base("HuggingFaceTB/SmolLM2-135M-Instruct", device="cpu")
        base.digest, base.hidden_size
    """
    base = read_base(source, revision, device, dtype, as_stored=as_stored, quantization=quantization, sha256=sha256)
    shard_(base.model, sharding, base.device)
    return base


def read_base(
    source: str | Path,
    revision: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    as_stored: bool = False,
    quantization: Quantization = "none",
    sha256: Callable[[Path], str] = file_sha256,
) -> Base:
    """Read a model into main memory; `shard_` moves it to its device (`quantization` puts it there at once).

    The dtype is `dtype`, or the files' own if `as_stored`, or bfloat16 on a GPU and float32 elsewhere. `quantization`
    holds all linear layers except the head in NF4; the result counts as another model, with its own digest. `sha256`
    returns the digest of a file and lets callers supply known digests. Weights already in the right dtype stay
    memory-mapped.

    Raises `UnfitModel` for a folder that cannot be a base model, and `InvalidModel` for an unknown source.
    """
    folder = Path(source) if Path(source).is_dir() else None
    name = folder.name if folder else str(source)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    usual = torch.bfloat16 if place.type == "cuda" else torch.float32
    kind: torch.dtype | Literal["auto"] = "auto" if as_stored else dtype or usual
    with loaded.refusing(str(source), revision, name):
        config = _fit_configuration(str(source), revision, folder)
        stored = loaded.dequantizing(config, quantization)
        model, tokenizer = _load(
            str(source), revision, kind, stored or nf4.options(quantization, dtype or usual, place)
        )
        loaded.restore_dtype_(model, kind, is_stored=bool(stored))
        nf4.require_held(model, quantization)
        loaded.check_tokens_(model, tokenizer)
    commit = getattr(model.config, "_commit_hash", None) or revision
    # Hub files are immutable under their commit, so hashing gigabytes is not needed.
    plain = folder_digest(folder, sha256) if folder else f"{source}@{commit}"
    nf4.keep_layout_(model)
    if place.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    digest, of = quantized_digest(plain, quantization), origin(source, commit)
    return Base(model.eval(), tokenizer, digest, place, of, quantization, loaded.stored_method(config))


def read_tokenizer(source: str, revision: str | None = None) -> Any:
    """Read a model's tokenizer as `load_base` does, with the plain chat template if it has none."""
    tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    set_plain_template(tokenizer)
    return tokenizer


@contextmanager
def disable_adapters(model: Any) -> Iterator[None]:
    """Disable the LoRA layers inside the block, which turns the model into its base model."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _fit_configuration(source: str, revision: str | None, folder: Path | None) -> dict[str, object]:
    """Return the content of config.json; raise `UnfitModel` if the files already show that it is no base model.

    Without this check transformers loads an adapter's base model by name, and silently ignores a model's own code.
    """
    if folder and (found := fault(folder)):
        raise UnfitModel(found.sentence, "model")
    if find_adapter_config_file(source, revision=revision):
        raise UnfitModel("it is an adapter: name its base model, and the adapter beside it", "model")
    config = loaded.read_configuration(source, revision)
    if "auto_map" in config:
        raise UnfitModel("it needs code of its own (auto_map), which is never run here", "model")
    return config


def _load(
    source: str, revision: str | None, dtype: torch.dtype | Literal["auto"], how: Mapping[str, object]
) -> tuple[Any, Any]:
    found: Any = AutoModelForCausalLM.from_pretrained(
        source,
        revision=revision,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # `require_fitting` refuses them by name
        **how,
    )
    model, info = found
    loaded.require_fitting(model, info)
    if _CACHE not in inspect.signature(model.forward).parameters:  # it ignores a cache silently
        raise ValueError(
            f"a {type(model).__name__} takes no {_CACHE}, by which replies are written here: offer another"
        )
    tokenizer = read_tokenizer(source, revision)
    ends = model.generation_config.eos_token_id
    tokenizer.stated_ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    # A fully fine-tuned model that is loaded again must be asked in the mode of its audit.
    ask_in_mode(tokenizer, _measured_mode(Path(source)))
    return model, tokenizer


def _measured_mode(folder: Path) -> Mode | None:
    """Return the thinking mode in which one of our own models was audited; None for any other folder."""
    try:
        found: Mode | None = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["rendering"]["asked"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return found
