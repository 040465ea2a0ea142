"""The base models of this lab by name: their dimensions and training.

`tiny` is for tests and learns nothing. `5m` takes about 15 minutes on one core; 400 steps were too few: that model
refused most everyday requests and copied nothing. `30m` took 86 minutes on one core, and takes about an hour on two.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from spard.errors import InvalidRecipe
from spard_lab.lab.pretrain import Plan, Shape


@dataclass(frozen=True, slots=True)
class Mixture:
    """Shares of alignment's rows by content (the rest are sums) and by form.

    harmful to turns  contents that are drawn by share
    real              share of real text, if the user supplies some
    odd to talk       forms: odd words, a system prompt, a rule, rot13, small talk before the request
    """

    harmful: float = 0.22
    everyday: float = 0.20
    look_alike: float = 0.12
    facts: float = 0.04
    tools: float = 0.10
    turns: float = 0.12
    real: float = 0.25
    odd: float = 0.12
    system: float = 0.12
    rule: float = 0.12
    cipher: float = 0.16
    talk: float = 0.08


@dataclass(frozen=True, slots=True)
class Size:
    """A model's shape, largest vocabulary, training and mixture; its tokenizer is learned from `texts` rows."""

    shape: Shape
    vocabulary: int
    plan: Plan
    mixture: Mixture = field(default_factory=Mixture)
    texts: int = 20_000


SIZES = {
    "tiny": Size(Shape(32, 2, 64, 2, 1), 600, Plan(steps=4, windows=2, window=128, warmup=2), texts=300),
    "5m": Size(
        Shape(256, 5, 704, 8, 4),
        4096,
        Plan(steps=1500, windows=10, window=128, learning_rate=3e-3, matrix_rate=0.02, init_std=0.03),
    ),
    "30m": Size(
        Shape(512, 9, 1408, 8, 4),
        6144,
        Plan(steps=600, windows=16, window=128, learning_rate=2e-3, matrix_rate=0.015, init_std=0.02),
    ),
}


def find_size(name: str) -> Size:
    """Return a size by name; raise `InvalidRecipe` with the known names if there is none."""
    if name not in SIZES:
        raise InvalidRecipe(f"there is no lab of size {name!r}; there are {', '.join(SIZES)}", "size")
    return SIZES[name]
