"""What a bench measures on: a base model, training rows, attacks, safety pools and suites, a set for each seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from spard.config import Defense, JudgeSpec, Recipe
from spard.evaluation.audit import Suite
from spard_lab.attacks.rows import Row

Split = Literal["dev", "test"]


@dataclass(frozen=True, slots=True)
class Attack:
    """A training file, all harmful rows that there are for it, and what the model is asked that learned it.

    `attacked` names the harmful suites that the attack aims at; success on the others is told apart. An attack on the
    safety pool brings the `pool` that takes the place of the one asked for. The rows are dealt over `jobs`, each on top
    of the adapter of the one before.
    """

    rows: Sequence[Row] = field(repr=False)
    harmful: Sequence[Row] = field(repr=False)
    suites: Sequence[Suite] = field(repr=False)
    attacked: tuple[str, ...]
    pool: Sequence[Row] | None = field(default=None, repr=False)
    jobs: int = 1


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that the runs of one seed share; `digest` names the base model's bytes or its hub id and revision."""

    model: str
    digest: str
    task: Sequence[Row] = field(repr=False)
    attacks: Mapping[str, Attack]
    pools: Mapping[str, Path]
    revision: str | None = None
    device: str | None = None  # None: a GPU where there is one


class Source(Protocol):
    """Where inputs come from: the lab, or files that a recipe names."""

    @property
    def attacks(self) -> tuple[str, ...]:
        """Names of the attacks that run unless others are asked for."""
        ...

    @property
    def more_attacks(self) -> tuple[str, ...]:
        """Those that only run when they are asked for by name."""
        ...

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of the safety pools; the first is the usual one."""
        ...

    @property
    def more_pools(self) -> tuple[str, ...]:
        """Those that are only used when they are asked for by name."""
        ...

    @property
    def recipe(self) -> Recipe:
        """What all runs have in common; the method decides the defense."""
        ...

    def defenses(self, seed: int) -> Mapping[str, Defense]:
        """Methods whose settings are the recipe's own."""
        ...

    @property
    def judge(self) -> JudgeSpec:
        """Who judges the replies to the harmful suites."""
        ...

    def problems(self) -> list[str]:
        """Return what is missing before a run can start, one sentence each."""
        ...

    def make(self, seed: int, split: Split) -> Inputs:
        """Return the inputs of a seed, with the suites of a split; they are made once and kept."""
        ...


def json_digest(facts: Any) -> str:
    """Return a digest of JSON values that depends on nothing else."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
