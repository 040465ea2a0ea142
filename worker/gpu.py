"""Query the GPUs through the driver, without importing torch, so that a worker can check them in milliseconds."""

from __future__ import annotations

from app.errors import Unfit
from app.jobs.needs import Room
from app.ops.gpus import PROBE, count, gpu_probe_succeeds, memories, names
from app.settings import Settings

__all__ = ["PROBE", "check", "count", "gpu_probe_succeeds", "memories", "names", "room"]


def check(settings: Settings) -> None:
    """Raise `Unfit` if the settings need a GPU and there is none, or need more GPUs than there are."""
    found = count()
    if settings.device == "cuda" and not found:
        text = "SPARD_DEVICE is cuda, but the driver shows no GPU. Install the NVIDIA driver, give the container a GPU,"
        raise Unfit(f"{text} mend CUDA_VISIBLE_DEVICES, or set SPARD_DEVICE=cpu.")
    if settings.device != "cpu" and found and found < settings.gpus_per_job:
        text = f"SPARD_GPUS_PER_JOB is {settings.gpus_per_job}, but the driver shows {found}."
        raise Unfit(f"{text} Give the worker more GPUs, or set a smaller number.")


def room(settings: Settings) -> Room:
    """Return the GPU memory that a job has here, in bytes for each GPU, and how many GPUs share a model.

    Without a GPU the room is unlimited.
    """
    found = [] if settings.device == "cpu" else memories()
    shared = settings.gpus_per_job * settings.nodes_per_job if settings.sharding == "full" else settings.gpus_per_job
    return Room(min(found), shared if settings.sharding != "none" else 1) if found else Room()
