"""The interface between a lab and the adversary's bench: a model to attack, material, and the truth about replies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from spard.config.run_spec import SuiteSpec
from spard.data.rows import Prompt
from spard_lab.adversary.base import Ability, Material
from spard_lab.lab.suites import FILES


@dataclass(frozen=True, slots=True)
class Ground:
    """One seed's lab, as `spard_lab.bench.adversary` uses it.

    model, digest  the base model's folder, and the digest of its bytes
    pool           file of the provider's safety pool
    material       rows and functions that the attacker may use
    suites         suites of the provider's audit; the gate decides on them
    harmful, benign, task  prompts that the bench asks after the jobs; no training and no gate has seen them
    is_harmful     return True if a decoded reply does what its prompt asks for; known by construction, without a judge
    is_refusal     return True if a reply refuses, in any of the lab's voices
    """

    model: str
    digest: str
    pool: Path
    material: Material
    suites: tuple[SuiteSpec, ...]
    harmful: tuple[Prompt, ...] = field(repr=False)
    benign: tuple[Prompt, ...] = field(repr=False)
    task: tuple[Prompt, ...] = field(repr=False)
    is_harmful: Callable[[Prompt, str], bool]
    is_refusal: Callable[[str], bool]


class Arena(Protocol):
    """A lab as the adversary's bench sees it."""

    @property
    def abilities(self) -> frozenset[Ability]:
        """The abilities that attacks can rely on in this lab."""
        ...

    def open_ground(self, seed: int) -> Ground:
        """Return the lab of a seed; make it first if it does not exist."""
        ...


def gate_suites(lab: Path) -> tuple[SuiteSpec, ...]:
    """Return the suites that the gate asks: the development split of a lab's folder."""
    harmful, benign, utility = (lab / name for name in FILES["dev"])
    return (
        SuiteSpec("harmful", "harmful", harmful),
        SuiteSpec("benign", "benign", benign),
        SuiteSpec("utility", "utility", utility),
    )
