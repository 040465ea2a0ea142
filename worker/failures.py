"""What went wrong, as a job's owner may read it: a code, a sentence, the field at fault, and whether to try again.

What was not foreseen is told in general words only; the details are in the log.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

from app.errors import AppError
from spard.errors import (
    CorruptCheckpoint,
    InvalidData,
    JudgeUnavailable,
    OutOfGpuMemory,
    SpardError,
    Stopped,
)

_TRY_AGAIN = (CorruptCheckpoint, JudgeUnavailable, OutOfGpuMemory, Stopped)
_GPU_OOM = "The GPU has too little memory for this job; a smaller batch_size or max_seq_length needs less."
_GPU_BROKE = "The GPU stopped working in the middle of this job."
_OOM = "The worker has too little memory for this job; a smaller batch_size or max_seq_length needs less."
_FULL = "The worker's disk is full."
_UNFORESEEN = "The job failed for a reason of ours, not of your file; the provider's log has the details."
_NO_MEMORY = re.compile("out of memory|ALLOC_FAILED")
_SERVER_ERROR = "server_error"
_BAD_FILE = "The job failed due to an invalid training file."  # as OpenAI begins it; scripts look for it


@dataclass(frozen=True, slots=True)
class Failure:
    """The error object of a job, and whether another attempt may end better."""

    code: str
    message: str
    param: str | None = None
    retryable: bool = False

    def error(self) -> dict[str, str | None]:
        return {"code": self.code, "message": self.message, "param": self.param}


OUT_OF_MEMORY = Failure("out_of_memory", _OOM, retryable=True)
GPU_BROKE = Failure("gpu_error", _GPU_BROKE, retryable=True)


def is_job_s_own(code: str) -> bool:
    """Whether a child that reports it may well do so again: nothing outside the job explains it."""
    return code in (OUT_OF_MEMORY.code, GPU_BROKE.code, _SERVER_ERROR)


def is_gpu_oom(error: BaseException) -> bool:
    """Whether torch, or a library below it, found too little memory on the GPU."""
    return type(error).__name__ == "OutOfMemoryError" or (
        _is_gpu_s(error) and _NO_MEMORY.search(str(error)) is not None
    )


def _is_gpu_s(error: BaseException) -> bool:
    """CUDA's errors; after most of them nothing works on the GPU in the same process any more."""
    is_named = type(error).__name__ == "AcceleratorError" or str(error).startswith("CUDA error")
    return isinstance(error, RuntimeError) and is_named


def failure(error: BaseException) -> Failure:
    """Every exception in the words of `Failure`."""
    match error:
        case InvalidData():
            return Failure(error.code, f"{_BAD_FILE} {_sentence(error.message)}", error.param or "training_file")
        case SpardError():
            return Failure(error.code, _sentence(error.message), error.param, isinstance(error, _TRY_AGAIN))
        case AppError():
            return Failure(error.code or _SERVER_ERROR, error.message, error.param, error.status >= 500)
        case MemoryError():
            return OUT_OF_MEMORY
        case RuntimeError() if is_gpu_oom(error):
            return Failure("gpu_oom", _GPU_OOM)
        case RuntimeError() if _is_gpu_s(error):
            return GPU_BROKE
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return Failure("storage_full", _FULL, retryable=True)
        case _:
            return Failure(_SERVER_ERROR, _UNFORESEEN, retryable=True)


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."
