"""Reads the layout of a model from the headers of its safetensors files, without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from spard.models.folder.headers import all_tensors
from spard.models.linears import EXPERTS, Layout, Linear, head_count, layer_stack

_TRANSPOSED = ("gpt2", "openai-gpt")  # model types with transformers' Conv1D layers: [inputs, outputs]
_OTHER_TOWER = re.compile(r"(^|\.)(mtp|[a-z_]*(vision|visual|audio|speech|image)[a-z_]*)(\.|$)")
_EMBEDDING = re.compile(r"(^|\.|_)(embed\w*|embeddings?|wte|wpe)$")
_HEADS = ("lm_head", "embed_out")

Shapes = Mapping[str, Sequence[int]]  # tensor shapes by name


def read_layout(source: str | Path) -> Layout | None:
    """Read the layout of the model in a folder; None if unreadable or without plain linear layers."""
    folder = Path(source)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        shapes = {name: tensor["shape"] for name, tensor in all_tensors(folder)}
        return stored_layout(shapes, config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def stored_layout(shapes: Shapes, config: Mapping[str, object]) -> Layout | None:
    """Return the layout that stored tensors and a configuration describe; None without plain linear layers.

    The loaded model (`spard.models.layout.inspect_layout`) is authoritative: files may name layers differently, hold
    each expert in tensors of its own, and omit the ties that transformers makes by default.
    """
    text = config.get("text_config")
    own: Mapping[str, object] = text if isinstance(text, Mapping) else config
    weights = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if name.endswith(".weight")}
    is_turned = own.get("model_type") in _TRANSPOSED
    linears = [_linear(path, shape, is_turned) for path, shape in weights.items() if _is_linear(path, shape)]
    in_language = [each.path for each in linears if not _OTHER_TOWER.search(each.path) and not _is_expert(each.path)]
    stack, count = layer_stack(in_language)
    if not count:
        return None
    # transformers fuses the experts of a layer into one tensor, which is no linear layer; files keep them apart.
    kept = [each for each in linears if not _is_expert(each.path)]
    return Layout(
        linears=tuple(sorted(kept, key=lambda each: _in_order(each.path))),
        stack=stack,
        layers=min(count, _layers(own) or count),
        heads=head_count(own),
        parameters=sum(prod(shape) for shape in shapes.values()),
        others=frozenset(weights.keys() - {each.path for each in kept}),
        state_spaces=frozenset(name.removesuffix(".D") for name in shapes if name.endswith(".D")),
        tied_head=_tied_head(weights, config, own),
        has_experts=any(EXPERTS.search(name) for name in shapes),
    )


def _tied_head(weights: Shapes, config: Mapping[str, object], own: Mapping[str, object]) -> str | None:
    """Return the path of the head if it is tied: declared as such, or not stored."""
    stored = next((path for path in weights if path.rpartition(".")[2] in _HEADS), None)
    is_tied = own.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    if is_tied is True or (is_tied is None and stored is None):
        return stored or _HEADS[0]
    return None


def _is_linear(path: str, shape: Sequence[int]) -> bool:
    return len(shape) == 2 and _EMBEDDING.search(path) is None


def _is_expert(path: str) -> bool:
    return "experts." in path and "shared_expert" not in path


def _linear(path: str, shape: Sequence[int], is_turned: bool) -> Linear:
    inputs, outputs = shape if is_turned and path.rpartition(".")[2] not in _HEADS else reversed(shape)
    return Linear(path, inputs, outputs)


def _layers(config: Mapping[str, object]) -> int | None:
    names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    return next((found for name in names if isinstance(found := config.get(name), int)), None)


def _in_order(path: str) -> list[tuple[int, str]]:
    """Return a sort key that orders numbers in paths numerically: 2 before 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]
