"""Errors that `spard` raises on purpose, each with a code that a job reports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

_NO_MEMORY = re.compile("out of memory|ALLOC_FAILED")
_OF_GPU = re.compile("(CUDA|cuDNN|cuBLAS|NCCL) error")  # how such a message begins


class UserError(Exception):
    """An error whose message is written for whoever ran the command or sent the request."""


class SpardError(UserError):
    """Base of all; `code` is stable and documented, `param` names the setting or file at fault."""

    code = "server_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRecipe(SpardError):
    """A setting is unknown, of the wrong type or out of range."""

    code = "invalid_recipe"


class AdapterMismatch(InvalidRecipe):
    """The adapter that a run was to go on from is another one's: another shape, another base model."""

    code = "adapter_mismatch"


class UnsupportedModule(InvalidRecipe):
    """The model cannot be given an adapter of these target modules; the message names one that it can."""

    code = "unsupported_module"


class InvalidExtension(SpardError):
    """An installed package registers something that cannot be used; the message names the package."""


class InvalidData(SpardError):
    """A row cannot be trained on; `row_code` is the code of the row's problem, where one row is at fault."""

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
    """Too many rows of a safety pool answer with harm what the base model refuses."""

    code = "inverted_pool"


class RowsQuarantined(SpardError):
    """Rows answer what the base model would refuse, and somebody is to look at them before anything is trained."""

    code = "rows_quarantined"


class TooManyRowsDropped(SpardError):
    """More rows answer what the base model would refuse than may be left out."""

    code = "too_many_rows_dropped"


class RowSignalUnavailable(SpardError):
    """The base model refuses nothing of the safety pool, so that it cannot tell which rows it would refuse."""

    code = "row_signal_unavailable"


@contextmanager
def convert_errors(kind: type[InvalidData]) -> Iterator[None]:
    """Raise an `InvalidData` from inside as `kind`, which says whose rows are at fault."""
    try:
        yield
    except InvalidData as error:
        raise kind(error.message, row_code=error.row_code) from error


class TrainAuditOverlap(SpardError):
    """The training file holds prompts that the audit asks."""

    code = "train_audit_overlap"


class ProviderDataOverlap(SpardError):
    """The safety pool holds prompts of the provider's own audit suites."""

    code = "provider_data_overlap"


class MethodMismatch(InvalidData):
    """The rows are preference pairs and the method learns from answers, or the other way round."""

    code = "method_mismatch"


class ExampleTooLong(InvalidData):
    """A row has more tokens than the limit; rows are never cut in silence."""

    code = "example_too_long"


class TooManyTurns(InvalidData):
    """A row whose every answer has to be rendered or read with all that stands before it, and that has too many."""

    code = "too_many_turns"
    pointer = "/messages"


class NoTrainableTokens(InvalidData):
    """A row in which loss falls on nothing, as the model's chat template renders it."""

    code = "no_trainable_tokens"


class ToolsNotRendered(InvalidData):
    """A row with a tool, a call or an answer that the model's chat template leaves out; `pointer` names the part."""

    code = "tools_not_rendered"

    def __init__(self, message: str, pointer: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.pointer = pointer


class ContentNotRendered(ToolsNotRendered):
    """A row with text that the model's chat template leaves out; `pointer` names it."""

    code = "content_not_rendered"


class TemplateFault(SpardError):
    """A chat template that answers cannot be trained with; the message goes on after "the model's chat template"."""

    code = "model_not_found"


class InvalidModel(SpardError):
    """The base model cannot be loaded or is not of a kind that can be trained here."""

    code = "model_not_found"


class UnfitModel(InvalidModel):
    """The base model's folder is there, and is of a kind that cannot be trained here, or is broken."""

    code = "invalid_model"


class NonFiniteLoss(SpardError):
    """The loss became NaN or infinite; a comparison with tau would be meaningless."""

    code = "non_finite_loss"


class OutOfGpuMemory(SpardError):
    """The GPU's memory was too little for the batch as it was cut; smaller pieces may fit."""

    code = "gpu_oom"


class JudgeUnavailable(SpardError):
    """The judge's endpoint did not answer; nothing that it did not see is called safe.

    `is_passing`: it may answer later, as after a time-out; `retry_after_s` is how long it asked us to wait.
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
    """The caller asked the run to stop; what was done is saved."""

    code = "stopped"


class SandboxUnavailable(SpardError):
    """Model-written code cannot be run safely on this machine, so it is not run."""

    code = "sandbox_unavailable"


class AdapterNotProved(SpardError):
    """What was saved is not what was trained, or changes nothing; it is not released."""

    code = "adapter_not_proved"

    def __init__(self, why: str) -> None:
        super().__init__(f"The adapter was trained and saved, but could not be proved: {why}")
        self.why = why


class NotProved(SpardError):
    """An adapter is not, or cannot be shown to be, what its manifest says."""

    code = "not_proved"


class InvalidKey(SpardError):
    """A key file cannot be read or holds another kind of key."""

    code = "invalid_key"


def is_gpu_error(error: BaseException) -> bool:
    """Tell CUDA's errors from others; after most of them nothing works on the GPU in the same process any more."""
    is_named = type(error).__name__ == "AcceleratorError" or _OF_GPU.match(str(error)) is not None
    return isinstance(error, RuntimeError) and is_named


def is_gpu_out_of_memory(error: BaseException) -> bool:
    """Whether torch, or a library below it, found too little memory on the GPU."""
    return type(error).__name__ == "OutOfMemoryError" or (
        is_gpu_error(error) and _NO_MEMORY.search(str(error)) is not None
    )
