"""The linear layers of a model by path and size, and the choice of those that LoRA adapts; needs no torch.

The default is the attention of each decoder layer; in a layer without attention its substitute: a linear attention, a
short convolution, the input of a state space. An attention with q_proj, k_proj, v_proj and o_proj has exactly these
adapted. Feed-forward layers, experts and routers are left out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
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


QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
MODULE = r"^[A-Za-z_][A-Za-z0-9_.]{0,127}$"  # a module name, or the end of its path
_ATTENTION = re.compile("attn|attention")
_FEED_FORWARD = re.compile("mlp|ffn|feed_forward|moe|expert|router")
_OF_FEED_FORWARD = {"up_proj", "down_proj"}  # a block with both is a feed-forward block, whatever its name
_NARROW = 8  # a gate has at least so many times more inputs than outputs
_SHOWN = 40  # maximum layer names in a message


@dataclass(frozen=True, slots=True)
class Reach:
    """The part of a model that an adapter changes.

    layers   number of decoder layers (out of `of_layers`) with an adapted module
    share    share of the model's parameters in adapted modules, 0 to 1
    """

    target_modules: tuple[str, ...]
    layers: int
    of_layers: int
    share: float
    leaves_out_experts: bool = False

    @property
    def display_names(self) -> tuple[str, ...]:
        """The last part of each module path, without repetition."""
        return tuple(dict.fromkeys(name.rpartition(".")[2] for name in self.target_modules))

    @property
    def sentence(self) -> str:
        """The reach as a sentence for people."""
        names = ", ".join(self.display_names)
        experts = "; experts and their router are left out" if self.leaves_out_experts else ""
        share = f"{self.share:.1%}".replace("%", " %")
        return f"{names}; reaches {self.layers} of {self.of_layers} layers, {share} of the parameters{experts}"

    def line(self, *, is_default: bool) -> str:
        """Return the sentence with its subject."""
        return f"{'LoRA default' if is_default else 'LoRA'}: {self.sentence}"


def default_targets(layout: Layout) -> tuple[str, ...]:
    """Return the default target modules; empty if no layer has anything like attention."""
    chosen = [each for linears in layout.in_stack().values() for each in _mixer(layout, linears)]
    return _names(layout, chosen)


def resolved_targets(layout: Layout, asked: Sequence[str] | None) -> tuple[str, ...]:
    """Return the target modules: the default or the requested ones, restricted to the language model."""
    if asked is None:
        return default_targets(layout)
    found = adapted_layers(layout, asked)
    own = [each for each in found if _is_of_language(layout, each)]
    return tuple(asked) if len(own) == len(found) else _names(layout, own)


def adapted_layers(layout: Layout, targets: Sequence[str]) -> list[Linear]:
    """Return the linear layers that the names select, by PEFT's rule: the end of the path matches."""
    return [each for each in layout.linears if any(_is_named(each.path, name) for name in targets)]


def reach(layout: Layout, asked: Sequence[str] | None = None) -> Reach:
    """Return the part of the model that the default or the requested modules change."""
    targets = resolved_targets(layout, asked)
    chosen = {each.path for each in adapted_layers(layout, targets)}
    layers = sum(any(each.path in chosen for each in linears) for linears in layout.in_stack().values())
    weights = sum(each.weights for each in layout.linears if each.path in chosen)
    leaves_out = layout.has_experts and not any("expert" in path for path in chosen)
    return Reach(targets, layers, layout.layers, weights / max(1, layout.parameters), leaves_out)


def refusal(layout: Layout, asked: Sequence[str], *, has_anchor: bool = False) -> str | None:
    """Return why an adapter cannot have these target modules, with the modules to name instead; None if it can.

    With `has_anchor` at least one decoder layer must be adapted, because the anchor constrains hidden states.
    """
    for name in asked:
        if why := _fault(layout, name):
            return why
    if has_anchor and not any(IN_LAYER.fullmatch(each.path) for each in adapted_layers(layout, asked)):
        names = ", ".join(asked)
        return f"{names} alone changes no hidden state, which the defense's anchor holds: name a decoder layer's too"
    return None


def _fault(layout: Layout, name: str) -> str | None:
    """Return why one name cannot be adapted, or None."""
    found = adapted_layers(layout, [name])
    if layout.tied_head and _is_named(layout.tied_head, name):
        return (
            f"{name} is tied to the embeddings: they are one weight, and merging an adapter of {name} would change "
            f"both; leave {name} out"
        )
    if not found:
        known = ", ".join(sorted({each.leaf for each in layout.linears if each.path != layout.tied_head})[:_SHOWN])
        if any(_is_named(path, name) or f".{name}." in path for path in layout.others):
            return f"{name} is no linear layer, and LoRA adapts these alone here; the model has {known}"
        return f"the model has no {name}; it has {known}"
    if any(_is_bypassed(layout, each) for each in found):
        return (
            f"{name} belongs to a state space, whose kernels read its weight and would pass an adapter by; "
            "of a state space name in_proj alone"
        )
    return None


def _mixer(layout: Layout, linears: Sequence[Linear]) -> Iterator[Linear]:
    """Yield the adapted modules of one decoder layer: its attention, or the substitute."""
    blocks: defaultdict[str, list[Linear]] = defaultdict(list)
    for each in linears:
        if not _FEED_FORWARD.search(each.block):
            blocks[each.block].append(each)
    whole = [block for block, inside in blocks.items() if set(QKVO) <= {each.leaf for each in inside}]
    named = [block for block in blocks if _ends_in_attention(block)]
    other = [block for block in blocks if not _is_flat(block) and not _ATTENTION.search(block)]
    for block in whole or named or other:
        yield from _projections(layout, block, blocks[block])


def _projections(layout: Layout, block: str, inside: Sequence[Linear]) -> Iterator[Linear]:
    """Yield the adapted modules of one block: q, k, v, o, or all except narrow gates."""
    leaves = {each.leaf for each in inside}
    if leaves >= _OF_FEED_FORWARD:
        return
    for each in inside:
        # A gate has one or two outputs per head; an adapter can be larger than the gate itself.
        is_gate = each.outputs <= 2 * layout.heads and each.outputs * _NARROW <= each.inputs
        if each.leaf in QKVO if leaves >= set(QKVO) else not (is_gate or _is_bypassed(layout, each)):
            yield each


def _is_bypassed(layout: Layout, linear: Linear) -> bool:
    """Return True if a state space's kernel reads the layer's weight instead of calling the layer."""
    return linear.block in layout.state_spaces and linear.leaf != "in_proj"


def _is_flat(block: str) -> bool:
    """Return True if the block is itself a decoder layer."""
    return block.rpartition(".")[2].isdigit() and IN_LAYER.fullmatch(block) is None


def _ends_in_attention(block: str) -> bool:
    """Return True if the last part of the path is an attention; modules inside of one do not count."""
    parts = [part for part in block.split(".") if not part.isdigit()]
    return bool(parts) and _ATTENTION.search(parts[-1]) is not None


def _is_of_language(layout: Layout, linear: Linear) -> bool:
    """Return True unless the layer belongs to another stack than the language model's, e.g. a vision tower."""
    place = IN_LAYER.fullmatch(linear.path)
    return place is None or (place["stack"] or "") == layout.stack


def _names(layout: Layout, chosen: Sequence[Linear]) -> tuple[str, ...]:
    """Return the shortest path endings that select exactly the chosen layers."""
    own = {each.path for each in chosen}
    rest = [path for path in (*(each.path for each in layout.linears), *layout.others) if path not in own]
    taken = {end for path in rest for end in _ends(path)}
    names = {next(end for end in (*_ends(each.path), each.path) if end not in taken) for each in chosen}
    usual = QKVO if names >= set(QKVO) else ()
    return (*usual, *sorted(names - set(usual)))


def _ends(path: str) -> Iterator[str]:
    """Yield the endings of a path, shortest first."""
    parts = path.split(".")
    for i in range(len(parts) - 1, -1, -1):
        yield ".".join(parts[i:])


def _is_named(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")
