"""Turn exceptions into failures that a job's owner may read: a code, a sentence, a field, and if a retry may help.

Unforeseen errors get a general sentence only; their details are in the log. `FAULTS` maps a code to whose fault it is.
"""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from app.errors import AppError
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
from worker.memory_kills import Memory

if TYPE_CHECKING:  # a child has no database, and does not wait for its library
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
        return {"code": self.code, "message": self.message, "param": self.param}


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
    """Return True if a child's failure with this code is explained by the job alone, so a retry may well fail too."""
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
