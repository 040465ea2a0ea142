"""Reads files of a base model's folder with size limits and precise errors, and checks config.json.

Of a safetensors file only the header is read: names, types and shapes of tensors, without their bytes. What is wrong
with a folder is a `Finding`, one sentence each. In config.json that is quantized weights, custom code, heads that
generate no text, or absurd sizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding about a folder: `code` is its kind; `sentence` names problem and remedy, without a final period.

    A fault disqualifies the folder as a base model; any other finding is information for the provider.
    """

    code: str
    sentence: str
    is_fault: bool = True


class FolderFault(Exception):
    """A fault that makes further checks of the folder impossible."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.finding = Finding(code, sentence)


def note(code: str, sentence: str) -> Finding:
    """Return a finding that disqualifies nothing."""
    return Finding(code, sentence, is_fault=False)


_MB = 1 << 20
_TOKENIZER, _INDEX, _TEMPLATE, _OTHER = 256 * _MB, 128 * _MB, 2 * _MB, 16 * _MB
_LARGE = {
    "tokenizer.json": _TOKENIZER,
    "vocab.json": _TOKENIZER,
    "merges.txt": _TOKENIZER,
    "tokenizer.model": _TOKENIZER,
    "model.safetensors.index.json": _INDEX,
}
_READ = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "merges.txt", "tokenizer.model")


def oversized_files(folder: Path) -> Iterator[Finding]:
    """Yield a fault for each file that loaders read as a whole and that is larger than any real file of its kind."""
    for path in sorted({path for pattern in _READ for path in folder.glob(pattern) if path.is_file()}):
        most = _LARGE.get(path.name, _TEMPLATE if path.suffix == ".jinja" else _OTHER)
        if (size := path.stat().st_size) > most:
            sentence = (
                f"{path.name} has {size / _MB:.0f} MB, and no more than {most // _MB} are read: give the real file"
            )
            yield Finding("file_too_large", sentence)


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file, {} if there is no file; raise `FolderFault` for anything else."""
    path = folder / name
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise _broken_file(name, f"{error.msg} in line {error.lineno}, column {error.colno}") from None
    except UnicodeDecodeError:
        raise _broken_file(name, "it is not UTF-8") from None
    except (ValueError, RecursionError):
        raise _broken_file(name, "it is nested too deeply, or has a number that cannot be read") from None
    except OSError as error:
        raise _broken_file(name, error.strerror or "it cannot be read") from None
    if not isinstance(found, dict):
        raise _broken_file(name, "it holds no JSON object")
    return found


def whole_number(value: object) -> int | None:
    """Return a JSON value as an integer; None for anything else, true and false included."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _broken_file(name: str, why: str) -> FolderFault:
    return FolderFault("broken_json", f"{name} is broken ({why}): copy or download the file again")


INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100 << 20  # the limit of safetensors itself
_LENGTH_BYTES = 8


class TensorEntry(TypedDict):
    """A tensor in a header: its type, its shape, and where its bytes begin and end."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


def weight_files(folder: Path) -> set[str]:
    """Return the names of the files to load; other files may hold the same weights again."""
    index = folder / INDEX
    if not index.is_file():
        return {"model.safetensors"}
    return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())


def tensors(path: Path) -> tuple[dict[str, TensorEntry], int]:
    """Return the header's entry of each tensor, and the offset of the tensors' bytes in the file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        # The length is untrusted: a forged header must not make this process allocate gigabytes.
        header = json.loads(file.read(min(length, _MAX_HEADER)))
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}, _LENGTH_BYTES + length


def all_tensors(folder: Path) -> Iterator[tuple[str, TensorEntry]]:
    """Yield the name and header entry of every tensor in the files to load."""
    for name in sorted(weight_files(folder)):
        yield from tensors(folder / name)[0].items()


def weights_fault(folder: Path) -> str | None:
    """Return a sentence about a weight file that is missing or truncated, or None."""
    try:
        names = sorted(weight_files(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "the index of its weights cannot be read"
    for name in names:
        try:
            is_whole = _bytes(folder / name) <= (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            is_whole = False
        if not is_whole:
            return f"{name} is not whole, as after a download that broke off"
    return None


def _bytes(path: Path) -> int:
    """Return the length that the file must have: the end of its last tensor."""
    found, start = tensors(path)
    return start + max((tensor["data_offsets"][1] for tensor in found.values()), default=0)


DEQUANTIZED = frozenset({"fp8", "mxfp4"})
"""Methods of `quantization_config` whose weights are converted to 16 or 32 bits when they are loaded."""

_NAMES = {"gptq": "GPTQ", "awq": "AWQ", "bitsandbytes": "bitsandbytes", "modelopt": "NVIDIA ModelOpt"}
_WRITES_NOTHING = {
    "ForSequenceClassification": "a classifier or reward model",
    "ForTokenClassification": "a token classifier",
    "ForQuestionAnswering": "an extractive question answerer",
    "ForMaskedLM": "a masked language model, which writes no replies",
    "ForImageClassification": "an image classifier",
    "ForSpeechSeq2Seq": "a speech model",
    "ForCTC": "a speech model",
}
_INTEGERS = frozenset({"I8", "U8", "I4", "U4", "I32", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"})
_MOST_POSITIONS = 1 << 28  # 27 times the longest context of any known model
_LONGEST = 200


def quantization_config(config: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return a configuration's quantization settings (also the text part's); None if there are none."""
    inner = config.get("text_config")
    for each in (config, inner if isinstance(inner, Mapping) else {}):
        for name in ("quantization_config", "compression_config"):
            if isinstance(found := each.get(name), Mapping):
                return found
        if isinstance(found := each.get("quantization"), Mapping) and "bits" in found:
            return {"quant_method": "MLX", **found}
    return None


def stored_quantization(folder: Path) -> str | None:
    """Return the method by which a folder's weights are stored if loading dequantizes them; None: plain weights."""
    method = str((quantization_config(read_object(folder, "config.json")) or {}).get("quant_method") or "")
    return method if method in DEQUANTIZED else None


def configuration_findings(folder: Path, config: Mapping[str, object]) -> Iterator[Finding]:
    """Yield the findings in the configuration itself."""
    yield from _own_code(folder, config)
    yield from _quantization_findings(folder, config)
    yield from _heads(config)
    yield from _sizes(config)


def _own_code(folder: Path, config: Mapping[str, object]) -> Iterator[Finding]:
    for path in sorted({*folder.glob("*_config.json"), *folder.glob("config.json")}):
        settings = config if path.name == "config.json" else read_object(folder, path.name)
        if "auto_map" in settings:
            yield Finding("own_code", f"{path.name} names code to run (auto_map), which is never run here")


def _quantization_findings(folder: Path, config: Mapping[str, object]) -> Iterator[Finding]:
    found = quantization_config(config)
    method = str((found or {}).get("quant_method") or "")[:_LONGEST]
    cure = "training and merging need the weights from before that: give the folder of the original model"
    if (folder / "hf_quant_config.json").is_file() and method != "modelopt":
        yield Finding("quantized", f"its weights are quantized by NVIDIA ModelOpt (hf_quant_config.json): {cure}")
    elif found is None:
        yield from _integer_weights(folder, cure)
    elif method not in DEQUANTIZED:
        named = _NAMES.get(method, method or "a method that config.json does not name")
        yield Finding("quantized", f"its weights are already quantized ({named}): {cure}")
    else:
        sentence = (
            f"its weights are stored in {method.upper()} and read back to 16 or 32 bits: LoRA only, and not in NF4"
        )
        yield note("dequantized", sentence)


def _integer_weights(folder: Path, cure: str) -> Iterator[Finding]:
    for name, tensor in all_tensors(folder):
        if tensor.get("dtype") in _INTEGERS and name.endswith((".weight", ".weight_packed", ".qweight", "_blocks")):
            what = f"{name} is stored as {tensor['dtype']}"
            yield Finding("quantized", f"its weights are quantized ({what}), and config.json does not say how: {cure}")
            return


def _heads(config: Mapping[str, object]) -> Iterator[Finding]:
    given = config.get("architectures")
    names = [str(each)[:_LONGEST] for each in given] if isinstance(given, list) else []
    ends = [(name, what) for name in names for end, what in _WRITES_NOTHING.items() if name.endswith(end)]
    if ends:
        name, what = ends[0]
        yield Finding("not_causal", f"it is {what} ({name}): give a causal language model, such as a chat model")
    elif config.get("is_encoder_decoder") is True:
        named = names[0] if names else config.get("model_type")
        yield Finding("not_causal", f"it is an encoder with a decoder ({named}): give a causal language model")


def _sizes(config: Mapping[str, object]) -> Iterator[Finding]:
    inner = config.get("text_config")
    for each in (config, inner if isinstance(inner, Mapping) else {}):
        stated = each.get("max_position_embeddings")
        if stated is not None and not 0 < (whole_number(stated) or 0) <= _MOST_POSITIONS:
            sentence = (
                f"config.json states max_position_embeddings {str(stated)[:40]}: state how many tokens the model knows"
            )
            yield Finding("absurd_size", sentence)
            return
