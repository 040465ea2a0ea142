"""The linear layers of a model by their paths and sizes, whether it is loaded or lies in files; without torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

IN_LAYER = re.compile(r"(?:(?P<stack>.*?)\.)?(?P<index>\d+)\.(?P<rest>.+)")  # a path inside of a list of layers
EXPERTS = re.compile("expert|moe|router")  # in the path of a part of a mixture of experts


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer: its path in the model, and how many elements go in and come out."""

    path: str
    inputs: int
    outputs: int

    @property
    def leaf(self) -> str:
        """The last part of its path."""
        return self.path.rpartition(".")[2]

    @property
    def block(self) -> str:
        """The path of the module that holds it."""
        return self.path.rpartition(".")[0]

    @property
    def weights(self) -> int:
        """How many elements its weight has."""
        return self.inputs * self.outputs


@dataclass(frozen=True, slots=True)
class Layout:
    """The linear layers of a model, and what decides which of them an adapter may change.

    stack         path of the list of decoder layers of the language model
    layers        how many layers that list has
    heads         the largest number of heads that the configuration names
    parameters    of the whole model
    others        paths of modules with weights that are no linear layers: embeddings, norms, experts in one tensor
    state_spaces  paths of the modules that hold a state space (Mamba)
    tied_head     path of the head, where it has the weights of the embeddings
    has_experts   some layers are mixtures of experts
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
        """Return the linear layers of each decoder layer."""
        found: defaultdict[int, list[Linear]] = defaultdict(list)
        for each in self.linears:
            place = IN_LAYER.fullmatch(each.path)
            if place and (place["stack"] or "") == self.stack and int(place["index"]) < self.layers:
                found[int(place["index"])].append(each)
        return found


def layer_stack(paths: Collection[str], within: str = "") -> tuple[str, int]:
    """Return the path of the longest list of layers below the path `within`, and how many layers it has."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for path in paths:
        place = IN_LAYER.fullmatch(path)
        if place and _is_child(path, within):
            found[place["stack"] or ""].add(int(place["index"]))
    stack = max(found, key=lambda each: len(found[each]), default="")
    return stack, max(found[stack], default=-1) + 1


def head_count(config: Mapping[str, object]) -> int:
    """Return the largest number of heads that a configuration names."""
    named = [value for name, value in config.items() if "head" in name and "dim" not in name and "size" not in name]
    return max((each for each in named if isinstance(each, int)), default=1)


def _is_child(path: str, within: str) -> bool:
    return not within or path.startswith(f"{within}.")
