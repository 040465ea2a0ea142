"""Plain supervised fine-tuning: the undefended baseline."""

from __future__ import annotations

from spard.config import NoDefense
from spard.methods.base import Method


class Sft(Method[NoDefense]):
    """Plain fine-tuning: utility steps only, without safe rows."""
