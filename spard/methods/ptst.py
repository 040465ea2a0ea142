"""PTST, pure tuning and safe testing (Lyu et al., 2024): no safety prompt in training, one in serving.

Training is plain fine-tuning. What defends is the system prompt that the tuned model is served and measured with;
training with it would undo the effect. It is a policy of the server: who writes the system prompt himself escapes it.
"""

from __future__ import annotations

from spard.config import Defense, Ptst


def serving_prompt(defense: Defense) -> str | None:
    """The system prompt that the tuned model has to be served and audited with."""
    return defense.safety_prompt if isinstance(defense, Ptst) else None
