"""Query GPUs through the CUDA driver, without torch, in milliseconds.

Computing on them is tested in a separate process: after a CUDA error a process cannot use the GPU again.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from app.ops.processes import python

PROBE = python("worker.gpu_probe")
_PROBE_S = 120.0
_DRIVER = "libcuda.so.1"
_NAME_CHARS = 100


def count(driver: str = _DRIVER) -> int:
    """Return the number of GPUs; 0 without a driver."""
    return _count(_open_driver(driver))


def names(driver: str = _DRIVER) -> list[str]:
    """Return each GPU's name and memory, as "NAME, N GiB"; [] without a driver."""
    cuda, found = _open_driver(driver), list[str]()
    for ordinal in range(_count(cuda)):
        name, memory, device = ctypes.create_string_buffer(_NAME_CHARS), ctypes.c_size_t(0), ctypes.c_int(0)
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        cuda.cuDeviceGetName(name, _NAME_CHARS, device)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        found.append(f"{name.value.decode(errors='replace')}, {memory.value / (1 << 30):.0f} GiB")
    return found


def gpu_probe_succeeds(
    probe: Sequence[str], environment: Mapping[str, str], gpus_per_job: int, *, quiet: bool = False
) -> bool:
    """Return True if the GPU probe exits with 0 before its timeout of 120 s.

    Its error output goes to standard error, or is discarded with `quiet`.
    """
    variables = {**environment, "SPARD_GPUS_PER_JOB": str(gpus_per_job)}
    stderr = subprocess.DEVNULL if quiet else None
    try:
        ended = subprocess.run(probe, env=variables, timeout=_PROBE_S, check=False, stderr=stderr)  # noqa: S603
    except subprocess.TimeoutExpired:
        return False
    return ended.returncode == 0


def memories(driver: str = _DRIVER) -> list[int]:
    """Return each GPU's memory in bytes; [] without a driver."""
    cuda, found = _open_driver(driver), list[int]()
    for ordinal in range(_count(cuda)):
        memory, device = ctypes.c_size_t(0), ctypes.c_int(0)
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        found.append(memory.value)
    return found


def _open_driver(driver: str) -> Any:
    """Return the driver's library, initialized; None if there is none or it cannot be initialized."""
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
