"""Selection of the safe set: the rows of the safety pool that a run trains on."""

from __future__ import annotations

from spard.config.earlier_versions import moved_names

__getattr__ = moved_names(__name__, {"choose": "spard.selection.select"})
