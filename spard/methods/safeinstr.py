"""SafeInstr (Bianchi et al., 2024): plain fine-tuning on training rows and safe rows together.

Two differences from the authors: the safe rows come from the run's own selection instead of a fixed list, and only
answers carry loss (theirs trains on prompts too). With more than about a tenth of safe rows a model begins to refuse
harmless requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from spard.config import SafeInstr as SafeInstrSettings
from spard.data.chat import EncodedSample
from spard.methods.base import Method


class SafeInstr(Method[SafeInstrSettings]):
    """Plain fine-tuning on the training rows and the safe rows."""

    def training_rows(self, task: Sequence[EncodedSample], safe: Sequence[EncodedSample]) -> Sequence[EncodedSample]:
        """Return all rows, the safe ones last; the batches of an epoch shuffle them."""
        return [*task, *safe]
