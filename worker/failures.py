"""Turn exceptions into failures that a job's owner may read: a code, a sentence, a field, and if a retry may help.

Unforeseen errors get a general sentence only; their details are in the log. `FAULTS` maps a code to whose fault it is.

A SIGKILL has no exception. `MemoryKills` detects if the kernel's out-of-memory killer sent it, on a host or inside a
unit or container. It reads the counters of this process's own cgroup and of its ancestors, in cgroup versions 1 and 2.
`oom_kill` counts the processes of a cgroup that an out-of-memory killer has ended; `oom` (version 2) counts how often
the cgroup reached its limit. A kill without a reached limit means that the machine's own memory was exhausted.
"""

from __future__ import annotations

import errno
import logging
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from app.errors import AppError
from app.help import job_cure
from spard.errors import (
    CorruptCheckpoint,
    InvalidData,
    InvalidModel,
    InvalidPool,
    InvalidSuite,
    InvertedPool,
    OutOfGpuMemory,
    RowSignalUnavailable,
    SpardError,
    Stopped,
    is_gpu_error,
    is_gpu_out_of_memory,
)

if TYPE_CHECKING:
    from app.db.tables.job_records import JobError


class Fault(StrEnum):
    """The responsible part of a failure; it decides if the failure costs the job an attempt."""

    job = "job"  # costs an attempt; there is no retry if it can only fail again
    worker = "worker"  # costs nothing if a probe confirms it; the worker takes no such job until the probe passes
    surroundings = "surroundings"  # costs nothing; the job waits until it is over


KILLS = ("machine_out_of_memory", "process_killed")  # faults of the surroundings whose end no probe can detect
# Every other code is the job's own. docs/reliability.md shows this table.
FAULTS = {
    "disk_error": Fault.worker,
    "disk_full": Fault.worker,
    "gpu_error": Fault.worker,
    "model_missing": Fault.worker,
    "model_not_found": Fault.worker,
    "hub_unavailable": Fault.surroundings,
    "judge_unavailable": Fault.surroundings,
    "storage_full": Fault.surroundings,
    "storage_unavailable": Fault.surroundings,
}
_WORDS = {  # neutral: neither accusing the customer nor telling of the provider's machines
    "disk_error": "The disk of a worker stopped working.",
    "disk_full": "The disk of a worker was full.",
    "gpu_error": "The GPU stopped working in the middle of this job.",
    "model_missing": "A worker does not have the base model at the moment.",
    "model_not_found": "The base model cannot be loaded; your files are not at fault.",
    "hub_unavailable": "The base model cannot be fetched at the moment.",
    "judge_unavailable": "The judge of the audit does not answer at the moment.",
    "storage_full": "The service's storage is full at the moment.",
    "storage_unavailable": "The service's storage does not answer at the moment.",
}
_TRY_AGAIN = (CorruptCheckpoint, OutOfGpuMemory, Stopped)
_GPU_OOM = "The GPU has too little memory for this job; a smaller batch_size or max_seq_length needs less."
_KILLED_OOM = (
    "The machine that this job ran on ran out of memory, and the system ended the training process. Your files are not "
    "at fault: the provider has to give the machine more memory, or less other work."
)
_KILLED = (
    "The training process was killed from outside: by the system, for want of memory, or by whoever runs the machine. "
    "Your files are not at fault; the provider finds which of the two in the logs of that machine."
)
_OOM = "The worker has too little memory for this job; a smaller batch_size or max_seq_length needs less."
_UNFORESEEN = "The job failed for a reason of ours, not of your file; the provider's log has the details."
_CHANGED = "The files of the base model have changed since it was offered; your files are not at fault."
SERVER_ERROR = "server_error"
_PROVIDERS = {
    InvalidSuite: "An audit suite of the provider cannot be used; your files are not at fault.",
    InvalidPool: "The safety pool of the provider cannot be used; your files are not at fault.",
    InvertedPool: "The safety pool of the provider answers with harm; your files are not at fault.",
    RowSignalUnavailable: "The provider's safety pool and base model do not fit together; your files are not at fault.",
}
# Codes of errors whose messages say what is wrong and not what to do; programs show the message alone.
_WITHOUT_CURE = frozenset(
    {
        *("adapter_mismatch", "adapter_not_proved", "base_model_changed", "checksum_mismatch", "example_too_long"),
        *("invalid_pool", "invalid_suite", "invalid_training_file", "inverted_pool", "no_trainable_tokens"),
        *("node_lost", "non_finite_loss", "provider_data_overlap", "row_signal_unavailable", "rows_quarantined"),
        *("too_many_rows_dropped", "train_audit_overlap", "unsafe_result"),
    }
)
_BAD_FILE = "The job failed due to an invalid training file."  # as OpenAI begins it; scripts look for it
_NO_ROOM = "No space left on device"  # as libraries quote the system's error that wrap it in one of their own
_FULL = (errno.ENOSPC, errno.EDQUOT)
_BROKEN = (errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ESTALE)


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure as the job's error object shows it; `retryable` is True if another attempt may succeed."""

    code: str
    message: str
    param: str | None = None
    retryable: bool = False

    @property
    def fault(self) -> Fault:
        """The responsible part: the job, unless `FAULTS` or `KILLS` has another one for the code."""
        return Fault.surroundings if self.code in KILLS else FAULTS.get(self.code, Fault.job)

    @property
    def is_kill(self) -> bool:
        """Return True if something outside the job killed its process; the job is retried minutes later, elsewhere."""
        return self.code in KILLS

    @property
    def is_unforeseen(self) -> bool:
        """Return True for a failure of no known kind, which has the code of a server error."""
        return self.code == SERVER_ERROR

    def error(self) -> JobError:
        """Return the error object that the job's row stores and the API shows."""
        cure = f" {job_cure(self.code)}" if self.code in _WITHOUT_CURE else ""
        return {"code": self.code, "message": f"{self.message}{cure}", "param": self.param}


class Failed(Exception):
    """The attempt has failed; `what` describes why."""

    def __init__(self, what: Failure) -> None:
        super().__init__(what.message)
        self.what = what


class ModelMissing(AppError):
    """The base model is not where this worker looks for it; the message is for the log."""

    code = "model_missing"


class BaseModelChanged(AppError):
    """The files of the base model have changed since it was offered; the message is for the log."""

    code = "base_model_changed"


class GpuMissing(AppError):
    """`SPARD_DEVICE` asks for a GPU and torch sees none; the message is for the log."""

    code = "gpu_error"


class HubUnavailable(AppError):
    """The hub did not answer; the message is for the log."""

    code = "hub_unavailable"


def outer_failure(code: str) -> Failure:
    """Return the failure for a code of `FAULTS`, in neutral words that blame neither customer nor machine."""
    return Failure(code, _WORDS[code], retryable=True)


OUT_OF_MEMORY = Failure("out_of_memory", _OOM, retryable=True)
MACHINE_OUT_OF_MEMORY = Failure("machine_out_of_memory", _KILLED_OOM, retryable=True)
KILLED = Failure("process_killed", _KILLED, retryable=True)
DISK_FULL = outer_failure("disk_full")
NODE_LOST = Failure("node_lost", "A machine that this job ran on was lost.", retryable=True)
RANK_LOST = Failure(SERVER_ERROR, "A process of this job on another machine has ended.", retryable=True)


def why_killed(memory: Memory | None) -> Failure:
    """Return the failure for a SIGKILL, which a job never sends itself, by whose memory was exhausted."""
    match memory:
        case Memory.limit:
            return OUT_OF_MEMORY
        case Memory.machine:
            return MACHINE_OUT_OF_MEMORY
        case None:
            return KILLED


def is_job_s_own(code: str) -> bool:
    """Return True if the job alone explains a child's failure with this code; a retry would probably fail too."""
    return code in (OUT_OF_MEMORY.code, "gpu_error", SERVER_ERROR)


def failure(error: BaseException) -> Failure:
    """Return the failure that describes an exception; one of no known kind becomes `server_error`, retryable."""
    match error:
        case InvalidSuite() | InvalidPool() | RowSignalUnavailable():
            return Failure(error.code, _PROVIDERS[type(error)])
        case InvalidData():
            return Failure(error.code, f"{_BAD_FILE} {_sentence(error.message)}", error.param or "training_file")
        case InvalidModel():
            return outer_failure("model_not_found")
        case BaseModelChanged():
            return Failure(str(error.code), _CHANGED)
        case SpardError() | AppError() if error.code in FAULTS:
            return outer_failure(str(error.code))
        case SpardError():
            return Failure(error.code, _sentence(error.message), error.param, isinstance(error, _TRY_AGAIN))
        case AppError():
            return Failure(error.code or SERVER_ERROR, error.message, error.param, error.status >= 500)
        case _:
            return _of_machine(error)


def log_failure(error: BaseException, log: logging.Logger) -> Failure:
    """Log an exception and return its failure; a stop that was asked for is logged as information, not as an error."""
    if isinstance(error, Stopped):
        log.info("%s", error.message)
    else:
        log.error("the job failed", exc_info=error)
    return failure(error)


def _of_machine(error: BaseException) -> Failure:
    """Return the failure for an exception of Python, torch or the operating system."""
    match error:
        case MemoryError():
            return OUT_OF_MEMORY
        case RuntimeError() if is_gpu_out_of_memory(error):
            return Failure("gpu_oom", _GPU_OOM)
        case RuntimeError() if is_gpu_error(error):
            return outer_failure("gpu_error")
        case OSError() if error.errno in _BROKEN:
            return outer_failure("disk_error")
        case OSError() if error.errno in _FULL:
            return DISK_FULL
        case _ if _NO_ROOM in str(error):
            return DISK_FULL
        case _:
            return Failure(SERVER_ERROR, _UNFORESEEN, retryable=True)


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


_V2, _V1 = "cgroup2", "cgroup"
_EVENTS = {_V2: "memory.events", _V1: "memory.oom_control"}
_PEAKS = {_V2: ("memory.peak", "memory.max"), _V1: ("memory.max_usage_in_bytes", "memory.limit_in_bytes")}


class Memory(StrEnum):
    """The memory whose exhaustion caused a kill: the worker's own limit, or the whole machine."""

    limit = "limit"  # the memory that this worker may use
    machine = "machine"  # the memory of the whole machine, whoever used it


@dataclass(frozen=True, slots=True)
class Kills:
    """Counters at one moment.

    own       kills in our own cgroup or below it
    above     kills in any cgroup above, or on the whole machine where no cgroup can be read
    at_limit  how often our own cgroup, or one above, reached its own limit
    """

    own: int = 0
    above: int = 0
    at_limit: int = 0


@dataclass(frozen=True, slots=True)
class _Group:
    folder: Path
    kind: str


class MemoryKills:
    """Counts out-of-memory kills around this process.

    `proc` is the mount point of procfs, and `root` the folder in front of the mount points that it lists.

        kills = (memory := MemoryKills()).read()
        ...  # a child ends by SIGKILL
        memory.memory_at_kill(kills)  # Memory.limit, Memory.machine or None
    """

    def __init__(self, proc: Path = Path("/proc"), root: Path = Path("/")) -> None:
        self._proc = proc
        self._groups = _groups(proc, root)

    def read(self) -> Kills:
        """Return the counters now; 0 where the kernel does not report one."""
        found = [_numbers(group.folder / _EVENTS[group.kind]) for group in self._groups]
        known = [numbers for numbers in found if "oom_kill" in numbers]
        if not known:
            return Kills(above=_numbers(self._proc / "vmstat").get("oom_kill", 0))
        own = found[0].get("oom_kill", 0)
        return Kills(own, max(each["oom_kill"] for each in known), max(each.get("oom", 0) for each in known))

    def memory_at_kill(self, before: Kills) -> Memory | None:
        """Return the memory that was exhausted if there was a kill since `before`; None if there was no kill."""
        now = self.read()
        if now.own <= before.own and now.above <= before.above:
            return None
        if now.at_limit > before.at_limit or (now.own > before.own and self._is_at_limit()):
            return Memory.limit
        return Memory.machine

    def describe(self) -> str:
        """Return the peak and the limit of each cgroup in MB, from our own upward, for the log."""
        told = []
        for group in self._groups:
            peak, limit = (_number(group.folder / name) for name in _PEAKS[group.kind])
            if peak is not None:
                of = "no limit" if limit is None else f"{limit >> 20} MB"
                told.append(f"{group.folder.name or '/'}: peak {peak >> 20} MB of {of}")
        return "; ".join(told)

    def _is_at_limit(self) -> bool:
        """Return True if a cgroup's peak use equals its limit; version 1 has no counter for reaching the limit."""
        for group in self._groups:
            peak, limit = (_number(group.folder / name) for name in _PEAKS[group.kind])
            if peak is not None and limit is not None and peak >= limit:
                return True
        return False


def _groups(proc: Path, root: Path) -> list[_Group]:
    """Return the memory cgroups of this process that are visible here, its own first, then its ancestors."""
    mounts = _mounts(proc / "self/mountinfo")
    for kind in (_V1, _V2):  # where both are mounted, version 1 has the memory controller if it has one at all
        path = _path(proc / "self/cgroup", kind)
        for of, within, mount in mounts:
            if of == kind and path is not None:
                top = root / mount.relative_to("/")
                return _upward(top, top / _relative(path, within), kind)
    return []


def _upward(top: Path, own: Path, kind: str) -> list[_Group]:
    if not own.is_dir():  # the cgroups of a container may be mounted without what the path begins with
        own = top
    found = [own, *own.parents]
    return [_Group(folder, kind) for folder in found[: found.index(top) + 1]]


def _relative(path: PurePosixPath, within: PurePosixPath) -> PurePosixPath:
    """Return a cgroup's path relative to a mount of the subtree `within`; a path outside becomes the mount itself."""
    if ".." in path.parts or not path.is_relative_to(within):
        return PurePosixPath()
    return path.relative_to(within)


def _mounts(path: Path) -> list[tuple[str, PurePosixPath, PurePosixPath]]:
    """Return (kind, root within the hierarchy, mount point) of each cgroup mount that may have a memory controller."""
    found = []
    for line in _lines(path):
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) < 5 or len(rest) < 3 or rest[0] not in (_V1, _V2):
            continue
        if rest[0] == _V2 or "memory" in rest[2].split(","):
            found.append((rest[0], PurePosixPath(fields[3]), PurePosixPath(fields[4])))
    return found


def _path(path: Path, kind: str) -> PurePosixPath | None:
    for line in _lines(path):
        number, controllers, where = (*line.split(":", 2), "", "")[:3]
        if (kind == _V2 and number == "0" and not controllers) or (kind == _V1 and "memory" in controllers.split(",")):
            return PurePosixPath(where)
    return None


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text(errors="replace").splitlines()
    return []


def _numbers(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(path: Path) -> int | None:
    """Return the number in a file; None if there is none or it means "no limit" (`max`, or a value above 2**62)."""
    line = next(iter(_lines(path)), "")
    return int(line) if line.isdecimal() and int(line) < 1 << 62 else None
