"""Reads the files of a sentence encoder: how texts are truncated, pooled and normalized. Needs no torch.

The layout is that of sentence-transformers: `modules.json` names the steps, `1_Pooling/config.json` the pooling,
`sentence_bert_config.json` the maximum length, `config_sentence_transformers.json` the prompt before each text and the
length of vectors. A folder without `modules.json` is a plain transformer with mean pooling. Settings that would change
the vectors and are not known here are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from spard.digests import file_sha256, model_digest
from spard.errors import SpardError
from spard.models.folder.check import layout_faults
from spard.models.folder.reading import FolderFault, oversized_files, read_object, whole_number

Pooling = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]

MOST_BYTES = 40 << 30  # of weights: the largest encoders have 8 billion float32 parameters
_MODULES = "modules.json"
_STEPS = ("Transformer", "Pooling", "Normalize")
_FLAGS: Mapping[str, Pooling] = {  # in the order of concatenation
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_FORMS = ("*.safetensors", "*.json", "*.model", "*.txt")
# The transformer's settings are in `sentence_KIND_config.json`; the first file with any settings counts.
_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_OLD_NAMES = {"model_args": "model_kwargs", "tokenizer_args": "processor_kwargs", "config_args": "config_kwargs"}
# The options in these settings that are followed here, or leave the vectors as they are.
_OPTIONS: Mapping[str, frozenset[str]] = {
    "model_kwargs": frozenset({"add_pooling_layer", "attn_implementation", "device_map", "dtype", "torch_dtype"}),
    "processor_kwargs": frozenset({"model_max_length", "padding_side", "use_fast"}),
    "config_kwargs": frozenset({"use_cache"}),
    "processing_kwargs.text": frozenset({"max_length", "padding"}),
    "processing_kwargs.common": frozenset(),
}
_STATES = {"method": "forward", "method_output_name": "last_hidden_state"}


class UnfitEmbedder(SpardError):
    """The folder is no sentence encoder that can be loaded: files are missing, broken or need custom code."""

    code = "invalid_embedder"

    def __init__(self, message: str, param: str | None = "recipe.selection.embedder") -> None:
        super().__init__(message, param)


@dataclass(frozen=True, slots=True)
class EncoderLayout:
    """How an encoder turns a text into a vector.

    transformer      folder of the weights and the tokenizer
    pooling          pooling modes; the results of several are concatenated
    normalizes       True if vectors are scaled to length 1
    prompt           text before each text
    includes_prompt  True if the prompt's tokens are pooled too
    max_tokens       maximum tokens of a text with its prompt; None: the limit of tokenizer and model
    lower_case       True if texts are lowercased before tokenization
    dimensions       how many components of a vector are kept; None: all
    """

    transformer: Path
    pooling: tuple[Pooling, ...] = ("mean",)
    normalizes: bool = False
    prompt: str = ""
    includes_prompt: bool = True
    max_tokens: int | None = None
    lower_case: bool = False
    dimensions: int | None = None


def read_encoder(folder: Path) -> EncoderLayout:
    """Read the layout of an encoder; raise `UnfitEmbedder`, with advice, for a folder that is no encoder."""
    try:
        return _read(folder)
    except FolderFault as fault:
        raise UnfitEmbedder(f"{folder.name} is no embedder: {fault.finding.sentence}") from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        message = f"{folder.name} is no embedder: its files cannot be read ({type(error).__name__})"
        raise UnfitEmbedder(message) from error


def encoder_digest(folder: Path, sha256: Callable[[Path], str] = file_sha256) -> str:
    """Return the SHA-256 over names and bytes of an encoder's weights, tokenizer and configuration.

    `sha256` returns the digest of a file and lets callers supply known digests.
    """
    forms = (*_FORMS, *(f"*/{form}" for form in _FORMS))
    paths = sorted({path for form in forms for path in folder.glob(form) if path.is_file()})
    return model_digest({path.relative_to(folder).as_posix(): sha256(path) for path in paths})


def _read(folder: Path) -> EncoderLayout:
    steps = _steps(folder)
    transformer = folder / steps.get("Transformer", "")
    _check_transformer(folder, transformer, has_pooling="Pooling" in steps)
    pooling = read_object(folder / steps["Pooling"], "config.json") if "Pooling" in steps else {}
    own, options = _own_settings(transformer)
    encoding = read_object(folder, "config_sentence_transformers.json")
    return EncoderLayout(
        transformer,
        _pooling(pooling),
        "Normalize" in steps,
        _prompt(encoding),
        pooling.get("include_prompt", True) is not False,
        _max_tokens(own, options),
        own.get("do_lower_case") is True,
        whole_number(encoding.get("truncate_dim")),
    )


def _steps(folder: Path) -> dict[str, str]:
    """Return the folder of each step by its kind."""
    path = folder / _MODULES
    if not path.is_file():
        return {}
    listed = json.loads(path.read_text(encoding="utf-8"))
    found: dict[str, str] = {}
    for each in listed if isinstance(listed, list) else ():
        kind, place = str(each["type"]).rpartition(".")[2], str(each["path"])
        if kind not in _STEPS:
            known = ", ".join(_STEPS)
            raise _fault("step", f"{_MODULES} has a step {kind[:40]!r}, and those known here are {known}: give another")
        if Path(place).is_absolute() or ".." in Path(place).parts:
            raise _fault("step", f"{_MODULES} names a folder outside of its own")
        if len(Path(place).parts) > 1:  # the digest covers the files of direct subfolders
            raise _fault("step", f"{_MODULES} names a folder inside of a subfolder: move it to the top")
        found[kind] = place
    return found


def _check_transformer(folder: Path, transformer: Path, *, has_pooling: bool) -> None:
    """Raise `FolderFault` for a folder that is unsafe or no encoder.

    Unsafe are weights other than safetensors, custom code, and files larger than any real ones.
    """
    for look in (oversized_files, layout_faults):
        if found := next((each for each in look(transformer) if each.is_fault), None):
            raise FolderFault(found.code, found.sentence)
    config = read_object(transformer, "config.json")
    if config.get("auto_map"):
        raise _fault("custom_code", "its config.json asks for code of its own (auto_map), which is never run")
    architecture = str(next(iter(config.get("architectures") or ()), ""))
    if config.get("is_encoder_decoder") is True or architecture.endswith("EncoderModel"):  # as T5EncoderModel
        raise _fault("architecture", "its model is an encoder with a decoder, which is not loaded here: give another")
    if architecture.endswith("ForCausalLM") and config.get("is_causal") is not False and not has_pooling:
        # Some versions of sentence-transformers take the mean, others the last token and a chat template.
        raise _fault(
            "pooling", f"it is a language model, and no {_MODULES} says how its states are pooled: give another"
        )
    if not any((transformer / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.txt")):
        raise _fault("no_tokenizer", "it has no tokenizer.json: download it again with its tokenizer")
    size = sum(path.stat().st_size for path in transformer.glob("*.safetensors"))
    if size > MOST_BYTES:
        raise _fault("too_large", f"its weights have {size >> 30} GB, and {MOST_BYTES >> 30} GB are taken at most")


def _pooling(config: Mapping[str, Any]) -> tuple[Pooling, ...]:
    named = config.get("pooling_mode") or [mode for flag, mode in _FLAGS.items() if config.get(flag) is True]
    asked = [named] if isinstance(named, str) else list(named)
    modes: dict[object, Pooling] = {mode: mode for mode in _FLAGS.values()}
    if unknown := [mode for mode in asked if mode not in modes]:
        raise _fault("pooling", f"its pooling {str(unknown[0])[:40]!r} is not known here")
    return tuple(modes[mode] for mode in asked) or ("mean",)


def _own_settings(transformer: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the transformer's settings and their options of loading and tokenizing, by the names in `_OPTIONS`.

    Raises `FolderFault` for settings that would change the vectors and are not followed here.
    """
    files = [f"sentence_{kind}_config.json" for kind in _KINDS]
    name, own = next(((name, found) for name in files if (found := read_object(transformer, name))), ("", {}))
    own = {_OLD_NAMES.get(key, key): value for key, value in own.items()}
    processing = dict(own.get("processing_kwargs") or {})
    tables = {**own, **{f"processing_kwargs.{kind}": table for kind, table in processing.items()}}
    options = {key: dict(tables.get(key) or {}) for key in _OPTIONS}
    for key, known in _OPTIONS.items():
        if unknown := sorted(set(options[key]) - known - {"trust_remote_code"}):  # that one is never followed
            raise _fault("settings", f"{name} sets {key}.{unknown[0][:40]}, which is not known here")
    modalities = dict(own.get("modality_config") or {"text": _STATES})
    if "message" in modalities:
        raise _fault(
            "settings", f"its texts are rendered by a chat template ({name}), which is not done here: give another"
        )
    if dict(modalities.get("text") or {}) != _STATES:
        raise _fault("settings", f"{name} names another output of the model than its last hidden states")
    return own, options


def _max_tokens(own: Mapping[str, Any], options: Mapping[str, Mapping[str, Any]]) -> int | None:
    given = (
        options["processing_kwargs.text"].get("max_length"),
        options["processor_kwargs"].get("model_max_length"),
        own.get("max_seq_length"),
    )
    return next((number for each in given if (number := whole_number(each))), None)


def _prompt(config: Mapping[str, object]) -> str:
    """Return the default prompt, or "" without one, as sentence-transformers does."""
    prompts, name = config.get("prompts"), config.get("default_prompt_name")
    return str(prompts.get(name) or "") if isinstance(prompts, dict) and isinstance(name, str) else ""


def _fault(code: str, sentence: str) -> FolderFault:
    return FolderFault(code, sentence)
