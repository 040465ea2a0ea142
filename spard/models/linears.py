"""The linear layers of a model by path and size, for a loaded model or its files; needs no torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

IN_LAYER = re.compile(r"(?:(?P<stack>.*?)\.)?(?P<index>\d+)\.(?P<rest>.+)")  # a path inside a list of layers
EXPERTS = re.compile("expert|moe|router")  # occurs in paths of mixtures of experts


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer: its path in the model, and its input and output widths."""

    path: str
    inputs: int
    outputs: int

    @property
    def leaf(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def block(self) -> str:
        """The path of the parent module."""
        return self.path.rpartition(".")[0]

    @property
    def weights(self) -> int:
        """The number of elements of its weight."""
        return self.inputs * self.outputs


@dataclass(frozen=True, slots=True)
class Layout:
    """The linear layers of a model, and the facts that decide which of them an adapter may change.

    stack         path of the language model's list of decoder layers
    layers        number of layers in that list
    heads         largest number of heads in the configuration
    parameters    number of parameters of the whole model
    others        paths of modules with weights that are not linear: embeddings, norms, experts in one tensor
    state_spaces  paths of the modules that hold a state space (Mamba)
    tied_head     path of the head if it shares the embeddings' weights
    has_experts   True if some layers are mixtures of experts
    """

    linears: tuple[Linear, ...]
    stack: str
    layers: int
    heads: int
    parameters: int
    others: frozenset[str] = frozenset()
    state_spaces: frozenset[str] = frozenset()
    tied_head: str | None = None
    has_experts: bool = False

    def in_stack(self) -> dict[int, list[Linear]]:
        """Return the linear layers of each decoder layer by its index."""
        found: defaultdict[int, list[Linear]] = defaultdict(list)
        for each in self.linears:
            place = IN_LAYER.fullmatch(each.path)
            if place and (place["stack"] or "") == self.stack and int(place["index"]) < self.layers:
                found[int(place["index"])].append(each)
        return found


def layer_stack(paths: Collection[str], within: str = "") -> tuple[str, int]:
    """Return the path of the longest list of layers below the path `within`, and its number of layers."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for path in paths:
        place = IN_LAYER.fullmatch(path)
        if place and _is_child(path, within):
            found[place["stack"] or ""].add(int(place["index"]))
    stack = max(found, key=lambda each: len(found[each]), default="")
    return stack, max(found[stack], default=-1) + 1


def head_count(config: Mapping[str, object]) -> int:
    """Return the largest number of heads in a configuration."""
    named = [value for name, value in config.items() if "head" in name and "dim" not in name and "size" not in name]
    return max((each for each in named if isinstance(each, int)), default=1)


def _is_child(path: str, within: str) -> bool:
    return not within or path.startswith(f"{within}.")
