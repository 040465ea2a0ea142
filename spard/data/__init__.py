"""Rows, chats and batches, and the only definition of a valid row."""

from __future__ import annotations

from spard.config.earlier_versions import moved_names

_ROWS = "spard.data.rows"
__getattr__ = moved_names(__name__, {"read_examples": _ROWS, "read_pool": _ROWS, "read_prompts": _ROWS})
