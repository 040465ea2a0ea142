"""The GPUs that the driver shows, without torch: a worker is to know within milliseconds whether it can start.

Whether one still computes is asked of a new process: in one that saw an error of CUDA's nothing works any more.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from app.errors import Unfit
from app.ops.processes import python
from app.settings import Settings

PROBE = python("worker.gpu_probe")
_DRIVER = "libcuda.so.1"
_PROBE_S = 120.0
_NAME_CHARS = 100


def check(settings: Settings) -> None:
    """Raise `Unfit` when a GPU is asked for and there is none."""
    found = count()
    if settings.device == "cuda" and not found:
        text = "SPARD_DEVICE is cuda, but the driver shows no GPU. Install the NVIDIA driver, give the container a GPU,"
        raise Unfit(f"{text} mend CUDA_VISIBLE_DEVICES, or set SPARD_DEVICE=cpu.")
    if settings.device != "cpu" and found and found < settings.gpus_per_job:
        text = f"SPARD_GPUS_PER_JOB is {settings.gpus_per_job}, but the driver shows {found}."
        raise Unfit(f"{text} Give the worker more GPUs, or set a smaller number.")


def works(probe: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether the probe comes to its end in time."""
    try:
        return subprocess.run(probe, env=dict(environment), timeout=_PROBE_S, check=False).returncode == 0  # noqa: S603
    except subprocess.TimeoutExpired:
        return False


def count(driver: str = _DRIVER) -> int:
    """How many there are; 0 without a driver."""
    return _count(_opened(driver))


def names(driver: str = _DRIVER) -> list[str]:
    """Return what the driver calls each of them, with its memory; nothing without a driver."""
    cuda, found = _opened(driver), list[str]()
    for ordinal in range(_count(cuda)):
        name, memory, device = ctypes.create_string_buffer(_NAME_CHARS), ctypes.c_size_t(0), ctypes.c_int(0)
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        cuda.cuDeviceGetName(name, _NAME_CHARS, device)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        found.append(f"{name.value.decode(errors='replace')}, {memory.value / (1 << 30):.0f} GiB")
    return found


def _opened(driver: str) -> Any:
    """Return the driver's library; None without one, or where it does not start."""
    try:
        cuda = ctypes.CDLL(driver)
    except OSError:
        return None
    return None if cuda.cuInit(0) else cuda


def _count(cuda: Any) -> int:
    found = ctypes.c_int(0)
    if cuda is None or cuda.cuDeviceGetCount(ctypes.byref(found)):
        return 0
    return found.value
