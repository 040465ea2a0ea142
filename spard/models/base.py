"""Loads base models from a folder or the hub: safetensors only, never a model's own code, and only weights that fit.

In NF4 (Dettmers et al., "QLoRA", 2023) linear layers have 4 bits per weight, by bitsandbytes, which is imported only if
NF4 is requested; embeddings, norms and the head stay unquantized. Training and inference compute the same.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from transformers.utils.peft_utils import find_adapter_config_file
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

from spard.config import MAX_SEQ_LENGTH, Quantization, Sharding
from spard.config.cpu import resolve_dtype
from spard.config.quantization import quantized_digest
from spard.data.chat import render_as_recorded, set_plain_template
from spard.digests import MANIFEST, file_sha256, folder_digest
from spard.errors import InvalidModel, InvalidRecipe, UnfitModel, is_gpu_error, is_gpu_out_of_memory
from spard.models.folder.check import Vocabulary, fault, unknown_id, vocabulary_findings
from spard.models.folder.reading import DEQUANTIZED, Finding, quantization_config
from spard.models.origin import Origin, origin
from spard.models.peft import BaseTunerLayer, see_bitsandbytes
from spard.models.products import widen_products_
from spard.models.sharding import shard_
from spard.models.stored_tokenizer import load_tokenizer

CPU_DTYPE = "SPARD_CPU_DTYPE"  # environment variable: the dtype of models on CPUs
_CPU_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
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


def default_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype that models are read in: bfloat16 on a GPU, and on a CPU what `SPARD_CPU_DTYPE` names.

    `SPARD_CPU_DTYPE` is `float32` (the default), `bfloat16`, which takes far less time on CPUs that multiply in it
    (`avx512_bf16` or `amx_bf16` in /proc/cpuinfo), or `auto`: bfloat16 on such CPUs, else float32. Raises
    `InvalidRecipe` for another word.
    """
    if device.type == "cuda":
        return torch.bfloat16
    name = os.environ.get(CPU_DTYPE, "float32")
    if (resolved := resolve_dtype(name)) not in _CPU_DTYPES:
        raise InvalidRecipe(f"{CPU_DTYPE} is {name!r}; it must be one of {', '.join(_CPU_DTYPES)}, auto", CPU_DTYPE)
    return _CPU_DTYPES[resolved]


def _bound_shape_caches() -> None:
    """Let PyTorch's library for CPUs keep its products in bfloat16 for few shapes; values that are set are kept.

    It keeps one for each number of tokens, 1,024 by default, and each holds megabytes: replies and rows of all lengths
    took 16 GB for a model of 135 million parameters. With 16 kept, passes take no longer.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "16")  # read at the first product


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

    The dtype is `dtype`, or the files' own if `as_stored`, or that of `default_dtype`. `quantization`
    holds all linear layers except the head in NF4; the result counts as another model, with its own digest. `sha256`
    returns the digest of a file and lets callers supply known digests. Weights already in the right dtype stay
    memory-mapped.

    Raises `UnfitModel` for a folder that cannot be a base model, and `InvalidModel` for an unknown source.
    """
    folder = Path(source) if Path(source).is_dir() else None
    name = folder.name if folder else str(source)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    usual = default_dtype(place)
    kind: torch.dtype | Literal["auto"] = "auto" if as_stored else dtype or usual
    if place.type == "cpu":
        _bound_shape_caches()
    with refusing(str(source), revision, name):
        config = _fit_configuration(str(source), revision, folder)
        stored = dequantizing(config, quantization)
        model, tokenizer = _load(
            str(source), revision, kind, stored or nf4_options(quantization, dtype or usual, place)
        )
        restore_dtype_(model, kind, is_stored=bool(stored))
        require_quantized(model, quantization)
        check_tokens_(model, tokenizer)
    commit = getattr(model.config, "_commit_hash", None) or revision
    # Hub files are immutable under their commit, so hashing gigabytes is not needed.
    plain = folder_digest(folder, sha256) if folder else f"{source}@{commit}"
    keep_nf4_layout_(model)
    lay_out_head_inputs_(model)
    if place.type == "cpu":
        widen_products_(model)
    if place.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    digest, of = quantized_digest(plain, quantization), origin(source, commit)
    return Base(model.eval(), tokenizer, digest, place, of, quantization, stored_method(config))


def read_tokenizer(source: str, revision: str | None = None) -> Any:
    """Read a model's tokenizer as `load_base` does, with the plain chat template if it has none."""
    tokenizer = load_tokenizer(source, revision)
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
    config = read_configuration(source, revision)
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
    require_fitting(model, info)
    if _CACHE not in inspect.signature(model.forward).parameters:  # it ignores a cache silently
        raise ValueError(
            f"a {type(model).__name__} takes no {_CACHE}, by which replies are written here: offer another"
        )
    tokenizer = read_tokenizer(source, revision)
    ends = model.generation_config.eos_token_id
    tokenizer.stated_ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    # A fully fine-tuned model that is loaded again must be asked as in its audit.
    render_as_recorded(tokenizer, measured_rendering(Path(source)))
    return model, tokenizer


def measured_rendering(folder: Path) -> Mapping[str, Any] | None:
    """Return how one of our own models was rendered in its audit; None for any other folder."""
    try:
        found: object = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["rendering"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return found if isinstance(found, dict) else None


# Checks that need the loaded model: weights that do not fit its configuration, and reasons why loading fails.

_SEES = ("vision_config", "audio_config", "vision_tower", "image_token_id", "image_token_index")
_ROLES = ("eos_token", "bos_token", "pad_token")


def stored_method(config: Mapping[str, object]) -> str | None:
    """Return the method by which a model's weights are stored in few bits (`fp8`, `mxfp4`); None for plain weights."""
    method = str((quantization_config(config) or {}).get("quant_method") or "")
    return method if method in DEQUANTIZED else None


def dequantizing(config: Mapping[str, object], quantization: Quantization) -> dict[str, object]:
    """Return the `from_pretrained` arguments that dequantize stored FP8 or MXFP4 weights; {} for plain weights.

    Raises `UnfitModel` if NF4 is requested too.
    """
    method = stored_method(config)
    if method is None:
        return {}
    if quantization != "none":
        raise UnfitModel(f"its weights are stored in {method.upper()}, and cannot be held in NF4 as well", "model")
    kinds: Mapping[str, Callable[..., object]] = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}
    return {"quantization_config": kinds[method](dequantize=True)}


class LoadingInfo(TypedDict):
    """What transformers reports of loading: names of weights, with both shapes where they differ, and errors."""

    missing_keys: Collection[str]
    mismatched_keys: Collection[tuple[str, Sequence[int], Sequence[int]]]
    unexpected_keys: Collection[str]
    error_msgs: Sequence[str]


def require_fitting(model: Any, info: LoadingInfo) -> None:
    """Raise `UnfitModel` if a weight is missing, has the wrong shape, or is unknown to the model class.

    `info` is transformers' loading info. Transformers only warns of these cases, although the model answers
    differently.
    """
    kind = type(model).__name__
    if missing := sorted(info["missing_keys"]):
        raise UnfitModel(f"its weights lack {missing[0]}{_more(missing)}: download or export the model again", "model")
    if other := sorted(info["mismatched_keys"]):
        name, stored, wanted = other[0]
        shapes = f"{name} has the shape {list(stored)}, and config.json says {list(wanted)}"
        raise UnfitModel(f"{shapes}: config.json and weights are of different models", "model")
    if left := sorted(info["unexpected_keys"]):
        sentence = f"its weights hold {left[0]}{_more(left)}, which a {kind} has no place for"
        if any(re.search("scale|zero|absmax|quant", name) for name in left):
            raise UnfitModel(f"{sentence}: they are quantized, and config.json does not say how", "model")
        raise UnfitModel(f"{sentence}: config.json names another architecture than the weights'", "model")
    if info["error_msgs"]:
        raise UnfitModel(f"its weights cannot be read: {str(info['error_msgs'][0]).splitlines()[0][:300]}", "model")


def restore_dtype_(model: Any, dtype: torch.dtype | str, *, is_stored: bool) -> None:
    """Convert all weights of a model stored in FP8 or MXFP4 to one dtype: transformers leaves plain ones as stored."""
    if not is_stored:
        return
    kinds = {each.dtype for each in model.parameters() if each.is_floating_point()}
    if isinstance(dtype, torch.dtype) and kinds != {dtype}:
        model.to(dtype)
    elif len(kinds) > 1:
        model.to(torch.bfloat16)


def check_tokens_(model: Any, tokenizer: Any) -> list[Finding]:
    """Compare the vocabulary with the embeddings and return the findings; fix a padding token without embedding.

    Raises `UnfitModel` for a token of plain text that has no embedding.
    """
    if not tokenizer.is_fast or tokenizer.eos_token_id is None:
        raise UnfitModel("it needs a fast tokenizer with an end-of-text token (eos_token)", "model")
    added = tokenizer.added_tokens_decoder.values()
    control = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
    roles = {name: token for name in _ROLES if (token := getattr(tokenizer, name, None)) is not None}
    vocabulary = Vocabulary(tokenizer.get_vocab(), frozenset(control), roles)
    rows = int(model.get_input_embeddings().weight.shape[0])
    found = list(vocabulary_findings(vocabulary, rows))
    if faults := [each for each in found if each.is_fault]:
        raise UnfitModel(faults[0].sentence, "model")
    if any(each.code == "padding_past_embeddings" for each in found):
        tokenizer.pad_token = tokenizer.eos_token
    return found


@contextmanager
def refusing(source: str, revision: str | None, name: str) -> Iterator[None]:
    """Turn any loading error inside the block into `UnfitModel` with a readable sentence; GPU errors pass through.

    Raises `InvalidModel` if the source is neither a folder nor known to the hub.
    """
    try:
        yield
    except UnfitModel as error:
        raise UnfitModel(f"model {name!r} cannot be loaded: {error.message}", "model") from error
    except (MemoryError, InvalidModel):
        raise
    except Exception as error:
        if is_gpu_error(error) or is_gpu_out_of_memory(error):
            raise
        kind = UnfitModel if Path(source).is_dir() else InvalidModel
        raise kind(f"model {name!r} cannot be loaded: {_reason(error, source, revision, name)}", "model") from error


def _reason(error: Exception, source: str, revision: str | None, name: str) -> str:
    text, config = str(error).strip() or type(error).__name__, dict[str, Any]()
    with suppress(Exception):
        config = read_configuration(source, revision)
    if "Unrecognized configuration class" in text:
        return _no_language_model(config)
    if "does not recognize this architecture" in text or "Unrecognized model in" in text:
        kind = config.get("model_type")
        named = f"its model_type {kind!r}" if kind else "a config.json without model_type"
        return (
            f"{named} is none that transformers {transformers.__version__} knows: give a model of a kind that it does"
        )
    if "backend tokenizer" in text:
        return "it has no tokenizer that can be read: tokenizer.json is missing"
    if "Padding_idx" in text:
        return "its pad_token_id in config.json lies past the embeddings: write the end token's id there, or remove it"
    if "see the above report" in text or "see the report" in text:
        kind = config.get("model_type")
        return f"its weights are not those of the {kind} that config.json describes: give both of one model"
    return text.splitlines()[0].replace(source, name)


def read_configuration(source: str, revision: str | None) -> dict[str, Any]:
    """Return the raw configuration; raise `OSError` if there is none."""
    found, _ = PretrainedConfig.get_config_dict(source, revision=revision)
    return found if isinstance(found, dict) else {}


def _no_language_model(config: Mapping[str, object]) -> str:
    kind = str(config.get("model_type"))
    given = config.get("architectures")
    named = str(given[0]) if isinstance(given, list) and given else kind
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES or any(name in config for name in _SEES) or "vision" in kind:
        return (
            f"it is a vision or audio model ({named}): give a language model, such as the text model that it is made of"
        )
    if kind in MODEL_MAPPING_NAMES and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return f"a {kind} model ({named}) does not write text token by token: give a causal language model"
    return f"{named} is no causal language model: give a model that writes text token by token, such as a chat model"


def _more(names: list[Any]) -> str:
    return f" and {len(names) - 1} more" if names[1:] else ""


def nf4_options(quantization: Quantization, dtype: torch.dtype, device: torch.device) -> dict[str, object]:
    """Return the `from_pretrained` arguments for NF4 with computation in `dtype`; {} for "none".

    Raises `ImportError` without bitsandbytes.
    """
    if quantization == "none":
        return {}
    if find_spec("bitsandbytes") is None:
        raise ImportError(f"{quantization} needs bitsandbytes: pip install 'spard[nf4]'")
    see_bitsandbytes()
    config: Any = BitsAndBytesConfig  # its arguments are not typed
    asked = config(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=quantization == "nf4_double",
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": asked, "device_map": {"": device}}


def keep_nf4_layout_(model: Any) -> None:
    """Keep NF4 layers from repacking their weights.

    On CPUs with bfloat16 products bitsandbytes permanently rounds the scales of a layer to bfloat16 at its first
    inference, which makes the audited model differ from the trained one.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def lay_out_head_inputs_(model: Any) -> None:
    """Let the head copy its inputs where they are a slice of longer rows, such as the last token of each prompt.

    PyTorch multiplies such a slice with frozen weights as one product for each row. On a CPU 60 prompts of a model with
    49,152 tokens took eight times as long in float32, and in bfloat16 hundreds of times, with a copy of the weights for
    each row.
    """
    if head := model.get_output_embeddings():
        head.register_forward_pre_hook(_make_contiguous)


def _make_contiguous(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(each.contiguous() for each in given)


def require_whole_blocks(model: Any) -> None:
    """Raise `ValueError` for a layer whose input width is not a multiple of the NF4 block size.

    bitsandbytes 0.50.2 quantizes such a layer correctly but dequantizes it wrongly on a CPU: 37 % error instead of 9 %.
    """
    for name, part in model.named_parameters():
        state = getattr(part, "quant_state", None)
        if state is not None and state.shape[1] % state.blocksize:
            size = f"{state.shape[1]} inputs, and NF4 needs a multiple of {state.blocksize}"
            raise ValueError(f"{name.removesuffix('.weight')} has {size}")


def require_quantized(model: Any, quantization: Quantization) -> None:
    """Raise `ValueError` if NF4 was requested and no layer is quantized, or a layer is quantized wrongly.

    Falcon, for example, has a linear class of its own, which transformers does not replace.
    """
    require_whole_blocks(model)
    if quantization != "none" and not quantized_bytes(model):
        kind = type(model).__name__
        raise ValueError(f"no layer of a {kind} can be held in NF4: offer it with the quantization never")


def quantized_bytes(model: Any) -> int:
    """Return the bytes of all NF4 weights with their scales."""
    return sum(_nf4_bytes(part) for part in model.parameters() if getattr(part, "quant_state", None) is not None)


def _nf4_bytes(part: Any) -> int:
    state = part.quant_state
    scales: list[Tensor] = [state.absmax, *([state.state2.absmax] if state.nested else [])]
    return sum(each.numel() * each.element_size() for each in (part, *scales))
