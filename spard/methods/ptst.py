"""PTST, pure tuning and safe testing (Lyu et al., 2024): no safety prompt in training, one in serving.

Training is plain fine-tuning. The defense is the system prompt that the fine-tuned model is served and audited with
(`serving_prompt` of its settings); training with that prompt would undo the effect. It is a policy of the server: a
client that sends its own system prompt bypasses it.
"""

from __future__ import annotations

from spard.config import Ptst as PtstSettings
from spard.methods.base import Method


class Ptst(Method[PtstSettings]):
    """Plain fine-tuning; the settings carry the system prompt for serving."""
