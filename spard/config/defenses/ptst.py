"""The settings of PTST: pure tuning, safe testing (Lyu et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from spard.config.defenses.base import Defense

SAFETY_PROMPT = (
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, while being safe."
)


@dataclass(frozen=True, slots=True)
class Ptst(Defense):
    """Pure tuning, safe testing: train plainly, and serve every conversation with a safety prompt before it."""

    summary: ClassVar[str] = (
        "plain fine-tuning; a system prompt in serving and audit, named in the adapter's README and manifest"
    )
    method: ClassVar[str] = "spard.methods.ptst:Ptst"
    order: ClassVar[int] = 5  # not for customers: the owner of the adapter can drop the prompt

    type: Literal["ptst"] = "ptst"
    safety_prompt: str = SAFETY_PROMPT

    @property
    def serving_prompt(self) -> str | None:
        """The safety prompt; without it in serving, nothing is defended."""
        return self.safety_prompt
