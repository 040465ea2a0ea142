"""The GPUs that the driver shows, counted without torch, within milliseconds."""

from __future__ import annotations

import ctypes

_DRIVER = "libcuda.so.1"


def count(driver: str = _DRIVER) -> int:
    """How many there are; 0 without a driver."""
    try:
        cuda = ctypes.CDLL(driver)
    except OSError:
        return 0
    found = ctypes.c_int(0)
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(found)):
        return 0
    return found.value
