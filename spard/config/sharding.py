"""How the weights of a model lie on the GPUs of a run. Only the standard library is used."""

from __future__ import annotations

from typing import Literal, TypeAlias

Sharding: TypeAlias = Literal["none", "full", "hybrid"]
"""none: every GPU holds the whole model; full: each holds a part; hybrid: each machine holds it, and its GPUs parts."""
