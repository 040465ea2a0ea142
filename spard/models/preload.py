"""Decides if a base model may be preloaded into the main memory of a process that waits for a job.

Nothing is preloaded onto a GPU, whose memory the plan of a training (`spard.models.fit`) uses whole. In main memory, as
much as the model's size stays free for the running job, which may load its model again to prove its adapter.
"""

from __future__ import annotations

_LEAST = 1 << 30  # minimum free bytes beside a small model


def may_read(model_bytes: int, free_bytes: int) -> bool:
    """Return True if a model may be read into main memory with so many free bytes."""
    return may_keep(model_bytes, free_bytes - model_bytes)


def may_keep(model_bytes: int, free_bytes: int) -> bool:
    """Return True if a model that has been read may stay, with so many bytes free beside it."""
    # Room for a second copy: the running job may load its own model once more for the proof.
    return free_bytes >= max(model_bytes, _LEAST)
