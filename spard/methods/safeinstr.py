"""SafeInstr (Bianchi et al., 2024): safe rows among the training rows, and plain fine-tuning on both.

The rows come from the run's own selection instead of the authors' list, and only answers carry loss, as everywhere
here; the authors train on the prompts too. More than about a tenth of safe rows makes models refuse what is harmless.
"""

from __future__ import annotations

from collections.abc import Sequence

from spard.config import SafeInstr as SafeInstrSettings
from spard.data.chat import Encoded
from spard.methods.base import Method


class SafeInstr(Method[SafeInstrSettings]):
    """Plain fine-tuning on both kinds of rows."""

    def training_rows(self, task: Sequence[Encoded], safe: Sequence[Encoded]) -> Sequence[Encoded]:
        """All rows, the safe ones last; the order of an epoch shuffles them."""
        return [*task, *safe]
