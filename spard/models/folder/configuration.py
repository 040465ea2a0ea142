"""Checks of config.json: quantized weights, custom code, heads that generate no text, absurd sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from spard.models.folder.reading import Finding, all_tensors, note, read_object, whole_number

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
