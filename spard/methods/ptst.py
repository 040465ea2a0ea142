"""PTST, pure tuning and safe testing (Lyu et al., 2024): no safety prompt in training, one in serving.

Training is plain fine-tuning. What defends is the system prompt that the tuned model is served and measured with
(`serving_prompt` of its settings); training with it would undo the effect. It is a policy of the server: who writes the
system prompt himself escapes it.
"""

from __future__ import annotations

from spard.config import Ptst as PtstSettings
from spard.methods.base import Method


class Ptst(Method[PtstSettings]):
    """Plain fine-tuning."""
