"""Errors that `spard` raises deliberately, each with a code that jobs report."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

_NO_MEMORY = re.compile("out of memory|ALLOC_FAILED")
_OF_GPU = re.compile("(CUDA|cuDNN|cuBLAS|NCCL) error")  # beginnings of CUDA's error messages


class UserError(Exception):
    """An error whose message is written for the user of a command or of the API."""


class SpardError(UserError):
    """Base of all deliberate errors; `code` is stable and documented, `param` names the setting or file at fault."""

    code = "server_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRecipe(SpardError):
    """A setting is unknown, of the wrong type or out of range."""

    code = "invalid_recipe"


class AdapterMismatch(InvalidRecipe):
    """The adapter to continue from does not match: another shape, or another base model."""

    code = "adapter_mismatch"


class UnsupportedModule(InvalidRecipe):
    """The model cannot have an adapter with these target modules; the message names suitable ones."""

    code = "unsupported_module"


class InvalidExtension(SpardError):
    """An installed package registers an unusable extension; the message names the package."""


class InvalidData(SpardError):
    """A row cannot be trained on; `row_code` is the code of the row's problem, if one row is at fault."""

    code = "invalid_training_file"

    def __init__(self, message: str, param: str | None = None, *, row_code: str | None = None) -> None:
        super().__init__(message, param)
        self.row_code = row_code


class InvalidSuite(InvalidData):
    """A row of an audit suite cannot be used; suites are the provider's, not the customer's."""

    code = "invalid_suite"


class InvalidPool(InvalidData):
    """A row of a safety pool cannot be used; pools are the provider's, not the customer's."""

    code = "invalid_pool"


class InvertedPool(InvalidPool):
    """Too many rows of a safety pool comply with harm that the base model refuses."""

    code = "inverted_pool"


class RowsQuarantined(SpardError):
    """Rows have answers that the base model refuses, and the provider must review them before the training."""

    code = "rows_quarantined"


class TooManyRowsDropped(SpardError):
    """More rows have answers that the base model refuses than may be dropped."""

    code = "too_many_rows_dropped"


class RowSignalUnavailable(SpardError):
    """The base model refuses none of the safety pool's prompts, so the row signal cannot work."""

    code = "row_signal_unavailable"


@contextmanager
def convert_errors(kind: type[InvalidData]) -> Iterator[None]:
    """Convert an `InvalidData` raised inside the block to `kind`, which tells whose rows are at fault."""
    try:
        yield
    except InvalidData as error:
        raise kind(error.message, row_code=error.row_code) from error


class TrainAuditOverlap(SpardError):
    """The training file contains prompts of the audit."""

    code = "train_audit_overlap"


class ProviderDataOverlap(SpardError):
    """The safety pool contains prompts of the provider's own audit suites."""

    code = "provider_data_overlap"


class MethodMismatch(InvalidData):
    """The rows are preference pairs and the method learns from answers, or the reverse."""

    code = "method_mismatch"


class ExampleTooLong(InvalidData):
    """A row has more tokens than the limit; rows are never truncated silently."""

    code = "example_too_long"


class TooManyTurns(InvalidData):
    """A row has too many answers that must each be rendered or tokenized with their whole context."""

    code = "too_many_turns"
    pointer = "/messages"


class NoTrainableTokens(InvalidData):
    """A row has no token with a loss, as the model's chat template renders it."""

    code = "no_trainable_tokens"


class ToolsNotRendered(InvalidData):
    """The model's chat template drops a tool, a call or a tool's result of a row; `pointer` names the part."""

    code = "tools_not_rendered"

    def __init__(self, message: str, pointer: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.pointer = pointer


class ContentNotRendered(ToolsNotRendered):
    """The model's chat template drops text of a row; `pointer` names it."""

    code = "content_not_rendered"


class TemplateFault(SpardError):
    """A chat template cannot be used for training; the message continues "the model's chat template ..."."""

    code = "model_not_found"


class InvalidModel(SpardError):
    """The base model cannot be loaded, or its kind cannot be trained here."""

    code = "model_not_found"


class UnfitModel(InvalidModel):
    """The base model's folder exists but is broken or of a kind that cannot be trained here."""

    code = "invalid_model"


class NonFiniteLoss(SpardError):
    """The loss became NaN or infinite, so a comparison with tau is meaningless."""

    code = "non_finite_loss"


class OutOfGpuMemory(SpardError):
    """The GPU has too little memory for the micro-batch; a smaller one may fit."""

    code = "gpu_oom"


class JudgeUnavailable(SpardError):
    """The judge's endpoint did not answer; replies that it has not seen never count as safe.

    `is_passing`: it may answer later, e.g. after a timeout; `retry_after_s` is the waiting time that it requested.
    """

    code = "judge_unavailable"

    def __init__(
        self, message: str, param: str | None = None, *, is_passing: bool = True, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, param)
        self.is_passing, self.retry_after_s = is_passing, retry_after_s


class CorruptCheckpoint(SpardError):
    """A resume state's bytes do not match its manifest."""

    code = "corrupt_checkpoint"


class Stopped(SpardError):
    """The caller asked the run to stop; finished work is saved."""

    code = "stopped"


class SandboxUnavailable(SpardError):
    """This machine cannot run model-written code safely, so the code is not run."""

    code = "sandbox_unavailable"


class AdapterNotProved(SpardError):
    """The saved adapter does not reproduce the trained model, or changes nothing; it is not released."""

    code = "adapter_not_proved"

    def __init__(self, why: str) -> None:
        super().__init__(f"The adapter was trained and saved, but could not be proved: {why}")
        self.why = why


class NotProved(SpardError):
    """An adapter does not match its manifest, or its manifest cannot be verified."""

    code = "not_proved"


class InvalidKey(SpardError):
    """A key file cannot be read or has the wrong kind of key."""

    code = "invalid_key"


def is_gpu_error(error: BaseException) -> bool:
    """Return True for CUDA errors, after most of which the GPU is unusable in the same process."""
    is_named = type(error).__name__ == "AcceleratorError" or _OF_GPU.match(str(error)) is not None
    return isinstance(error, RuntimeError) and is_named


def is_gpu_out_of_memory(error: BaseException) -> bool:
    """Return True if torch, or a library below it, ran out of GPU memory."""
    return type(error).__name__ == "OutOfMemoryError" or (
        is_gpu_error(error) and _NO_MEMORY.search(str(error)) is not None
    )
