"""Measure the energy that processors and GPUs used, where this machine's counters can be read.

Processors: RAPL through `/sys/class/powercap`, one zone `intel-rapl:N` for each package (AMD's too, from Linux 5.8),
microjoules in `energy_uj` that begin anew at `max_energy_range_uj`. The kernel lets only root read it since 2020
(CVE-2020-8694), and virtual machines have none. GPUs: NVML's counter of millijoules since the driver was loaded, from
Volta on (`nvmlDeviceGetTotalEnergyConsumption`). Both count whole devices: whatever else runs on them is in the figure.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

POWERCAP = Path("/sys/class/powercap")
_RAPL = "intel-rapl:"
_LIBRARY = "libnvidia-ml.so.1"


@dataclass(slots=True)
class EnergyCounter:
    """One device's counter: `read` returns joules that only grow, or begin anew at `range_j` where it is not None."""

    name: str
    read: Callable[[], float]
    range_j: float | None = None
    last: float = 0.0

    def consumed_joules(self) -> float:
        """Return the joules since the last call; the counter may have begun anew once."""
        now = self.read()
        grown = now - self.last + (self.range_j if self.range_j and now < self.last else 0.0)
        self.last = now
        return max(0.0, grown)


class EnergyMeter:
    """All counters of this machine that can be read; `missing` says of the others why not."""

    def __init__(self, powercap: Path = POWERCAP, gpus: Iterable[int] | None = None) -> None:
        processors, why = _rapl_counters(powercap)
        devices, why_gpus = _nvml_counters(range(torch.cuda.device_count()) if gpus is None else gpus)
        self._counters = [*processors, *devices]
        self.missing = [reason for reason in (why, why_gpus) if reason]
        for each in self._counters:
            each.last = each.read()

    def consumed_joules(self) -> dict[str, float]:
        """Return the joules by device since the last call, or since the meter was made; call it every few minutes."""
        found: dict[str, float] = {}
        for each in list(self._counters):
            try:
                found[each.name] = each.consumed_joules()
            except (OSError, ValueError) as error:
                self._counters.remove(each)
                self.missing.append(f"{each.name}: its counter could not be read any more ({error})")
        return found


def _rapl_counters(powercap: Path) -> tuple[list[EnergyCounter], str | None]:
    """Return the counters of the processors' packages, and why there are none."""
    zones = sorted(each for each in powercap.glob(f"{_RAPL}*") if each.name.count(":") == 1)
    if not zones:
        return [], f"processor: {powercap} has no zone {_RAPL}N (no RAPL, a virtual machine, or not let through)"
    found = list[EnergyCounter]()
    for zone in zones:
        try:
            counter = _rapl_counter(zone)
            counter.read()
        except (OSError, ValueError) as error:
            name = error.strerror if isinstance(error, OSError) else error
            return [], f"processor: {zone / 'energy_uj'} cannot be read ({name}); the kernel lets only root read it"
        found.append(counter)
    return found, None


def _rapl_counter(zone: Path) -> EnergyCounter:
    name = (zone / "name").read_text().strip()
    most = float((zone / "max_energy_range_uj").read_text())

    def read() -> float:
        return float((zone / "energy_uj").read_text()) / 1e6

    return EnergyCounter(f"{zone.name} {name}", read, most / 1e6)


def _nvml_counters(gpus: Iterable[int]) -> tuple[list[EnergyCounter], str | None]:
    """Return the counters of this process's GPUs, by their numbers in torch; none without GPUs, and no reason then."""
    wanted = [str(torch.cuda.get_device_properties(each).uuid) for each in gpus]
    if not wanted:
        return [], None
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return [], f"GPU: {_LIBRARY} cannot be loaded"
    if library.nvmlInit_v2():
        return [], "GPU: NVML does not start"
    found = list[EnergyCounter]()
    for uuid in wanted:
        handle, name = ctypes.c_void_p(), uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        if library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)):
            return [], f"GPU: NVML does not know {name}"
        counter = EnergyCounter(name, _nvml_reader(library, handle))
        with suppress(OSError):
            counter.read()
            found.append(counter)
    has_all = len(found) == len(wanted)
    return found, None if has_all else "GPU: NVML has no energy counter for it (older than Volta, MIG)"


def _nvml_reader(library: ctypes.CDLL, handle: ctypes.c_void_p) -> Callable[[], float]:
    def read() -> float:
        millijoules = ctypes.c_ulonglong()
        status = library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
        if status:
            raise OSError(f"NVML's error {status}")
        return millijoules.value / 1e3

    return read
