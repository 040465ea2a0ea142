"""The shape of a language model, read from its configuration without torch.

Llama's and Qwen's families are known: attention with grouped queries and a gated MLP. Of a mixture of experts nothing
is said. Sizes are numbers of elements.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_NORMED_HEADS = ("qwen3", "olmo2", "gemma3", "gemma3_text")  # models with a norm over each head of queries and keys


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides how much memory a model takes: width, layers, heads and vocabulary."""

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

    @property
    def queries(self) -> int:
        """The width of all queries, and of what attention gives."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """The width of all keys, and of all values."""
        return self.kv_heads * self.head_dim

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """The linear layers of one decoder layer: how many elements go in and come out."""
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
        """The parameters of one decoder layer, but for biases."""
        return sum(wide * out for wide, out in self.linear.values()) + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """The parameters of the model, but for biases."""
        embeddings = self.vocab * self.hidden * (1 if self.is_tied else 2)
        return embeddings + self.layers * self.layer_parameters + self.hidden


def shape_of(config: Mapping[str, object]) -> Shape | None:
    """Return the shape that a configuration describes; None where it is of a kind that is not known."""
    text = config.get("text_config")
    own = text if isinstance(text, Mapping) else config
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
    """Read the shape from `config.json` in a model's folder; None where there is none, or of a kind that is unknown."""
    try:
        config = json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return shape_of(config) if isinstance(config, dict) else None


def _number(config: Mapping[str, object], name: str) -> int | None:
    found = config.get(name)
    return found if isinstance(found, int) and found > 0 else None
