"""Plain supervised fine-tuning: the undefended baseline."""

from __future__ import annotations

from spard.config import NoDefense
from spard.methods.base import Method


class Sft(Method[NoDefense]):
    """One utility step after the other; the safe losses are not looked at."""
