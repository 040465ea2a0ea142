"""Checks that need the loaded model: weights that do not fit its configuration, and reasons why loading fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypedDict

import torch
import transformers
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

from spard.config import Quantization
from spard.errors import InvalidModel, UnfitModel, is_gpu_error, is_gpu_out_of_memory
from spard.models.folder.configuration import DEQUANTIZED, quantization_config
from spard.models.folder.finding import Finding
from spard.models.folder.vocabulary import Vocabulary, vocabulary_findings

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
