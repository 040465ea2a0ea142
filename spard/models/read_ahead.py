"""Whether a base model may be read ahead, into the main memory of a process that waits for a job.

On a GPU nothing is held ahead: the plan of a training (`spard.models.fit`) has all of it. In main memory the model of
the job that works may need as much again, as while its adapter is proved, so that much stays free.
"""

from __future__ import annotations

_LEAST = 1 << 30  # bytes that stay free beside a small model


def may_read(model_bytes: int, free_bytes: int) -> bool:
    """Whether a model may be read into so many free bytes of main memory."""
    return may_keep(model_bytes, free_bytes - model_bytes)


def may_keep(model_bytes: int, free_bytes: int) -> bool:
    """Whether a model that was read may stay, where so many bytes are free beside it."""
    return free_bytes >= max(model_bytes, _LEAST)
