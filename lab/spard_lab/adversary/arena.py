"""What a lab gives to the adversary's bench: a model to attack, material, and the truth about its replies."""

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
    """One seed's lab.

    model, digest  the base model's folder, and the digest of its bytes
    pool           the provider's safety pool
    suites         what the provider audits with; the gate decides on these
    harmful, benign, task  what the bench asks afterward; no training and no gate saw them
    is_harmful     whether a reply, decoded, does what its prompt asked for: known by construction, no judge
    is_refusal     whether a reply refuses, in any of the lab's voices
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
        """What an attack may count on."""
        ...

    def open_ground(self, seed: int) -> Ground:
        """Return the lab of a seed, made if it is not there."""
        ...


def gate_suites(lab: Path) -> tuple[SuiteSpec, ...]:
    """Return the suites that the gate asks: the development split of a lab's folder."""
    harmful, benign, utility = (lab / name for name in FILES["dev"])
    return (
        SuiteSpec("harmful", "harmful", harmful),
        SuiteSpec("benign", "benign", benign),
        SuiteSpec("utility", "utility", utility),
    )
