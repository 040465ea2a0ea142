"""What a job's owner reads when something went wrong."""

from __future__ import annotations

import errno

import pytest
import torch

from app.storage import StorageFull
from spard.errors import (
    ExampleTooLong,
    InvalidData,
    InvalidModel,
    InvalidRecipe,
    JudgeUnavailable,
    NonFiniteLoss,
    OutOfGpuMemory,
)
from worker.failures import Failure, failure


@pytest.mark.parametrize(
    ("error", "code", "param", "retryable"),
    [
        (InvalidData("line 3 is empty"), "invalid_training_file", "training_file", False),
        (ExampleTooLong("line 3 is long", "validation_file"), "example_too_long", "validation_file", False),
        (InvalidModel("no such model", "model"), "model_not_found", "model", False),
        (InvalidRecipe("lora: no", "lora"), "invalid_recipe", "lora", False),
        (NonFiniteLoss("the loss is not finite"), "non_finite_loss", None, False),
        (JudgeUnavailable("no answer"), "judge_unavailable", None, True),
        (StorageFull("No room."), "storage_full", None, True),
        (OSError(errno.ENOSPC, "full"), "storage_full", None, True),
        (MemoryError(), "out_of_memory", None, True),
        (torch.OutOfMemoryError("CUDA"), "gpu_oom", None, False),
        (torch.AcceleratorError("CUDA error: out of memory"), "gpu_oom", None, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x"), "gpu_oom", None, False),
        (OutOfGpuMemory("too little", "batch_size"), "gpu_oom", "batch_size", True),
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), "gpu_error", None, True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), "gpu_error", None, True),
        (RuntimeError("out of memory, says a file"), "server_error", None, True),
        (ZeroDivisionError("x"), "server_error", None, True),
    ],
)
def test_every_exception_has_a_code(error: BaseException, code: str, param: str | None, retryable: bool) -> None:
    found = failure(error)
    assert (found.code, found.param, found.retryable) == (code, param, retryable)


def test_what_was_not_foreseen_is_not_quoted() -> None:
    assert "secret" not in failure(RuntimeError("secret")).message


def test_a_bad_file_is_told_as_openai_tells_it() -> None:
    message = failure(InvalidData("line 3 is empty")).message
    assert message == "The job failed due to an invalid training file. Line 3 is empty."


def test_a_failure_is_an_error_object() -> None:
    assert Failure("a", "b", "c").error() == {"code": "a", "message": "b", "param": "c"}
