"""The shape of a language model, read from its configuration and files without torch.

For the Llama and Qwen families (grouped-query attention, gated MLP) the configuration is enough. Other models also need
the layout of their linear layers, which the headers of the safetensors files give. Sizes are numbers of elements.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from spard.models.folder.reading import all_tensors
from spard.models.targets import (
    EXPERTS,
    QKVO,
    Layout,
    Linear,
    adapted_layers,
    head_count,
    layer_stack,
    resolved_targets,
)

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

    The loaded model (`spard.models.lora.inspect_layout`) is authoritative: files may name layers differently, hold
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


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_PLAIN = {*QKVO, "gate_proj", "up_proj", "down_proj"}  # the linear layers of Llama's kind of decoder layer
_SPELLINGS = {  # names in older configurations
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length"),
}
_NORMED_HEADS = ("qwen3", "olmo2", "gemma3", "gemma3_text")  # models with a norm over each head of queries and keys


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers that decide a model's memory: width, layers, heads and vocabulary.

    layout   all linear layers, if the decoder layers are not of Llama's kind; else None
    experts  output elements per token of one layer's experts, in a mixture of experts
    """

    hidden: int
    inner: int  # of the gated MLP
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int | None = None
    is_tied: bool = False  # the head has the embeddings' weights
    has_normed_heads: bool = False
    layout: Layout | None = None
    experts: int = 0

    @property
    def queries(self) -> int:
        """The total width of the queries and of the attention's output."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """The total width of the keys, which is also the total width of the values."""
        return self.kv_heads * self.head_dim

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """The linear layers of one decoder layer: (input, output) widths by name."""
        return {
            "q_proj": (self.hidden, self.queries),
            "k_proj": (self.hidden, self.keys),
            "v_proj": (self.hidden, self.keys),
            "o_proj": (self.queries, self.hidden),
            "gate_proj": (self.hidden, self.inner),
            "up_proj": (self.hidden, self.inner),
            "down_proj": (self.inner, self.hidden),
        }

    @property
    def layer_parameters(self) -> int:
        """The parameters of one decoder layer without biases; the mean if layers differ."""
        if self.layout:
            return max(0, self.layout.parameters - self._embeddings) // self.layers
        return sum(wide * out for wide, out in self.linear.values()) + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """The parameters of the model without biases."""
        if self.layout:
            return self.layout.parameters
        return self._embeddings + self.layers * self.layer_parameters + self.hidden

    @property
    def quantizable(self) -> list[int]:
        """The sizes of the weights that NF4 can hold: all linear layers except the head and the experts."""
        if self.layout:
            return [each.weights for each in self.layout.linears if each.outputs != self.vocab]
        return [wide * out for wide, out in self.linear.values()] * self.layers

    def adapted_sizes(self, names: Sequence[str] | None) -> list[tuple[int, int]]:
        """Return the (input, output) widths of each layer that LoRA adapts; None: the default layers."""
        if self.layout:
            found = adapted_layers(self.layout, resolved_targets(self.layout, names))
            return [(each.inputs, each.outputs) for each in found]
        leaves = {name.rpartition(".")[2] for name in names or QKVO}
        return [size for name, size in self.linear.items() if name in leaves] * self.layers

    @property
    def _embeddings(self) -> int:
        return self.vocab * self.hidden * (1 if self.is_tied else 2)


def read_model_shape(config: Mapping[str, object], layout: Layout | None = None) -> Shape | None:
    """Return the shape that a configuration describes; None for an unknown architecture.

    With a model's `layout` every architecture with a known width and vocabulary has a shape.
    """
    text = config.get("text_config")
    own = text if isinstance(text, Mapping) else config
    if layout and not _is_plain(layout):
        return _shape_from_layout(own, layout)
    # The formulas for dense layers underestimate a mixture of experts, so without a layout it has no shape.
    if any(own.get(name) for name in _EXPERTS):
        return None
    hidden, heads = _number(own, "hidden_size"), _number(own, "num_attention_heads")
    inner, layers, vocab = (_number(own, name) for name in ("intermediate_size", "num_hidden_layers", "vocab_size"))
    if not (hidden and heads and inner and layers and vocab):
        return None
    return Shape(
        hidden=hidden,
        inner=inner,
        layers=layers,
        heads=heads,
        kv_heads=_number(own, "num_key_value_heads") or heads,
        head_dim=_number(own, "head_dim") or hidden // heads,
        vocab=vocab,
        positions=_number(own, "max_position_embeddings"),
        is_tied=bool(own.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        has_normed_heads=own.get("model_type") in _NORMED_HEADS,
    )


def read_shape(source: str) -> Shape | None:
    """Read the shape from `config.json` in a model's folder; None if there is none or the architecture is unknown."""
    try:
        config = json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return read_model_shape(config, read_layout(source)) if isinstance(config, dict) else None


def _is_plain(layout: Layout) -> bool:
    """Return True if all decoder layers are of Llama's kind."""
    layers = layout.in_stack().values()
    return not layout.has_experts and all({each.leaf for each in linears} == _PLAIN for linears in layers)


def _shape_from_layout(config: Mapping[str, object], layout: Layout) -> Shape | None:
    """Return the shape of a model whose layers are not of Llama's kind."""
    hidden, vocab = _number(config, "hidden_size"), _number(config, "vocab_size")
    inside = [each for linears in layout.in_stack().values() for each in linears]
    if not (hidden and vocab and inside):
        return None
    heads = _number(config, "num_attention_heads") or 1
    experts = _expert_outputs(config, hidden) if layout.has_experts else 0
    return Shape(
        hidden=hidden,
        inner=max(experts, *(each.outputs for each in inside)),
        layers=layout.layers,
        heads=heads,
        kv_heads=_number(config, "num_key_value_heads") or heads,
        head_dim=_number(config, "head_dim") or hidden // heads,
        vocab=vocab,
        positions=_number(config, "max_position_embeddings"),
        is_tied=layout.tied_head is not None,
        layout=layout,
        experts=experts,
    )


def _expert_outputs(config: Mapping[str, object], hidden: int) -> int:
    """Return the output elements per token of the active experts: gated MLP and result of each."""
    inner = _number(config, "moe_intermediate_size") or _number(config, "intermediate_size") or 4 * hidden
    return (_number(config, "num_experts_per_tok") or 1) * (2 * inner + hidden)


def _number(config: Mapping[str, object], name: str) -> int | None:
    found = [config.get(each) for each in (name, *_SPELLINGS.get(name, ()))]
    return next((each for each in found if isinstance(each, int) and each > 0), None)
