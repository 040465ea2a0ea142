"""What a job's owner reads when something went wrong."""

from __future__ import annotations

import errno
import logging
import re
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from app.storage import ObjectMissing, StorageError, StorageFull
from spard.errors import (
    ExampleTooLong,
    InvalidData,
    InvalidModel,
    InvalidPool,
    InvalidRecipe,
    InvalidSuite,
    InvertedPool,
    JudgeUnavailable,
    NonFiniteLoss,
    OutOfGpuMemory,
    RowSignalUnavailable,
    RowsQuarantined,
    Stopped,
    TooManyRowsDropped,
)
from worker.failures import FAULTS, Failure, Fault, HubUnavailable, ModelMissing, failure, log_failure, outer_failure


@pytest.mark.parametrize(
    ("error", "code", "param", "retryable"),
    [
        (InvalidData("line 3 is empty"), "invalid_training_file", "training_file", False),
        (ExampleTooLong("line 3 is long", "validation_file"), "example_too_long", "validation_file", False),
        (InvalidSuite("line 3 is empty", "suite"), "invalid_suite", None, False),
        (InvalidPool("line 3 is empty"), "invalid_pool", None, False),
        (InvertedPool("2 of 12 rows: rows 1, 5"), "inverted_pool", None, False),
        (RowSignalUnavailable("it refused none"), "row_signal_unavailable", None, False),
        (RowsQuarantined("2 rows: lines 3, 17", "training_file"), "rows_quarantined", "training_file", False),
        (TooManyRowsDropped("2 rows: 3, 17", "training_file"), "too_many_rows_dropped", "training_file", False),
        (InvalidModel("no such model", "model"), "model_not_found", None, True),
        (ModelMissing("/models/x"), "model_missing", None, True),
        (HubUnavailable("no answer"), "hub_unavailable", None, True),
        (InvalidRecipe("lora: no", "lora"), "invalid_recipe", "lora", False),
        (NonFiniteLoss("the loss is not finite"), "non_finite_loss", None, False),
        (JudgeUnavailable("no answer"), "judge_unavailable", None, True),
        (StorageError("The storage refused tenants/org-1: AccessDenied."), "storage_unavailable", None, True),
        (StorageFull("No room."), "storage_full", None, True),
        (ObjectMissing("The object files/1 is missing."), "object_missing", None, True),
        (OSError(errno.ENOSPC, "full"), "disk_full", None, True),
        (OSError(errno.EROFS, "read only"), "disk_error", None, True),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "disk_full", None, True),
        (MemoryError(), "out_of_memory", None, True),
        (torch.OutOfMemoryError("CUDA"), "gpu_oom", None, False),
        (torch.AcceleratorError("CUDA error: out of memory"), "gpu_oom", None, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x"), "gpu_oom", None, False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "gpu_oom", None, False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "gpu_error", None, True),
        (torch.distributed.DistBackendError("NCCL error in: x.cpp:1, unhandled cuda error"), "gpu_error", None, True),
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


@pytest.mark.parametrize(
    ("error", "level", "has_traceback"),
    [(Stopped("stopped after step 3 of 9"), "INFO", False), (ZeroDivisionError("x"), "ERROR", True)],
)
def test_a_stop_that_was_asked_for_is_no_error_in_the_log(
    error: Exception, level: str, has_traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert log_failure(error, logging.getLogger("child")) == failure(error)
    (record,) = caplog.records
    assert (record.levelname, bool(record.exc_info)) == (level, has_traceback)


def test_what_was_not_foreseen_is_not_quoted() -> None:
    assert "secret" not in failure(RuntimeError("secret")).message


@pytest.mark.parametrize("kind", [InvalidSuite, InvalidPool, InvertedPool])
def test_the_provider_s_rows_are_not_shown_to_a_customer(kind: type[InvalidData]) -> None:
    message = failure(kind("line 3, /prompt: secret")).message
    assert "secret" not in message
    assert "line 3" not in message
    assert "your files are not at fault" in message


@pytest.mark.parametrize("code", FAULTS)
def test_what_is_around_a_job_is_told_in_neutral_words(code: str) -> None:
    found = outer_failure(code)
    assert (found.fault, found.param, found.retryable) == (FAULTS[code], None, True)
    assert found.message.endswith(".")
    accusing = "your files are" in found.message and "not at fault" not in found.message
    assert not accusing


def test_what_no_table_names_is_the_job_s_own() -> None:
    assert failure(NonFiniteLoss("the loss is not finite")).fault == Fault.job


def test_the_documents_show_whose_fault_each_code_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    shown = dict(re.findall(r"^\| `(\w+)` \| (worker|surroundings) \|", page, re.MULTILINE))
    assert shown == {code: fault.value for code, fault in FAULTS.items()}


def test_a_bad_file_is_told_as_openai_tells_it() -> None:
    message = failure(InvalidData("line 3 is empty")).message
    assert message == "The job failed due to an invalid training file. Line 3 is empty."


def test_a_failure_is_an_error_object() -> None:
    assert Failure("a", "b", "c").error() == {"code": "a", "message": "b", "param": "c"}
