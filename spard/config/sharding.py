"""The setting of how a model's weights are distributed over the GPUs of a run. Imports the standard library only."""

from __future__ import annotations

from typing import Literal, TypeAlias

Sharding: TypeAlias = Literal["none", "full", "hybrid"]
"""none: every GPU holds the whole model; full: every GPU holds a part; hybrid: the GPUs of each machine share one
copy."""
