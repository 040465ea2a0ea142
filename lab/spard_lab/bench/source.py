"""The interface of a bench's inputs: base model, training rows, attacks, safety pools and suites for each seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from spard.config import Defense, JudgeSpec, Recipe
from spard.evaluation.audit import Suite
from spard_lab.attacks.rows import Row

Split = Literal["dev", "test"]


@dataclass(frozen=True, slots=True)
class Attack:
    """A training file and the suites that its model is asked.

    rows      rows of the training file
    harmful   all harmful rows that exist for it
    suites    the audit suites
    attacked  names of the harmful suites that the attack aims at; success on others is counted separately
    pool      a safety pool that replaces the requested one, for attacks on the pool
    jobs      number of successive jobs that the rows are spread over, each on top of the last adapter
    """

    rows: Sequence[Row] = field(repr=False)
    harmful: Sequence[Row] = field(repr=False)
    suites: Sequence[Suite] = field(repr=False)
    attacked: tuple[str, ...]
    pool: Sequence[Row] | None = field(default=None, repr=False)
    jobs: int = 1


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that the runs of one seed share.

    `digest` identifies the base model's bytes, or its hub id and revision. A model with random weights, which only
    estimates use, is not `is_trained`. `make_unaligned` makes the model before its alignment for defenses that need it;
    None if it is there already or has to be named.
    """

    model: str
    digest: str
    task: Sequence[Row] = field(repr=False)
    attacks: Mapping[str, Attack]
    pools: Mapping[str, Path]
    revision: str | None = None
    device: str | None = None  # None: a GPU if there is one
    is_trained: bool = True
    make_unaligned: Callable[[], object] | None = field(default=None, repr=False, compare=False)


class Source(Protocol):
    """The source of a bench's inputs: a lab, or the files that a recipe names."""

    @property
    def attacks(self) -> tuple[str, ...]:
        """Names of the attacks that run by default."""
        ...

    @property
    def more_attacks(self) -> tuple[str, ...]:
        """Names of the attacks that run only if they are asked for."""
        ...

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of the safety pools; the first is the default."""
        ...

    @property
    def more_pools(self) -> tuple[str, ...]:
        """Names of the pools that are used only if they are asked for."""
        ...

    @property
    def recipe(self) -> Recipe:
        """The settings that all runs share; the method determines the defense."""
        ...

    def defenses(self, seed: int) -> Mapping[str, Defense]:
        """Return the defenses by method name whose settings are the recipe's own."""
        ...

    @property
    def judge(self) -> JudgeSpec:
        """The judge of the replies to the harmful suites."""
        ...

    def problems(self) -> list[str]:
        """Return a sentence for each problem that prevents a run."""
        ...

    def make(self, seed: int, split: Split) -> Inputs:
        """Return the inputs of a seed, with the suites of a split; they are made once and kept."""
        ...


def json_digest(facts: Any) -> str:
    """Return the SHA-256 of JSON values, independent of the order of keys."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
