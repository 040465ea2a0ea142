"""The setting of how a model's weights are distributed over the GPUs of a run. Imports the standard library only."""

from __future__ import annotations

from typing import Literal, TypeAlias

Sharding: TypeAlias = Literal["none", "full", "hybrid"]
"""none: every GPU holds the whole model; full: each holds a part; hybrid: each machine holds it, and its GPUs parts."""
