"""Everything that `spard` raises on purpose, each with a code that a job reports."""

from __future__ import annotations


class SpardError(Exception):
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


class InvalidData(SpardError):
    """A row cannot be trained on."""

    code = "invalid_training_file"


class ExampleTooLong(InvalidData):
    """A row has more tokens than the limit; rows are never cut in silence."""

    code = "example_too_long"


class NoTrainableTokens(InvalidData):
    """A row in which loss falls on nothing, as the model's chat template renders it."""

    code = "no_trainable_tokens"


class InvalidModel(SpardError):
    """The base model cannot be loaded or is not of a kind that can be trained here."""

    code = "model_not_found"


class NonFiniteLoss(SpardError):
    """The loss became NaN or infinite; a comparison with tau would be meaningless."""

    code = "non_finite_loss"


class OutOfGpuMemory(SpardError):
    """The GPU's memory was too little for the batch as it was cut; smaller pieces may fit."""

    code = "gpu_oom"


class JudgeUnavailable(SpardError):
    """The judge's endpoint did not answer; nothing that it did not see is called safe."""

    code = "judge_unavailable"


class CorruptCheckpoint(SpardError):
    """A checkpoint's bytes do not match its manifest."""

    code = "corrupt_checkpoint"


class Stopped(SpardError):
    """The caller asked the run to stop; what was done is checkpointed."""

    code = "stopped"


class SandboxUnavailable(SpardError):
    """Model-written code cannot be run safely on this machine, so it is not run."""

    code = "sandbox_unavailable"


class AdapterNotProved(SpardError):
    """What was saved is not what was trained, or changes nothing; it is not released."""

    code = "adapter_not_proved"

    def __init__(self, why: str) -> None:
        super().__init__(f"The adapter was trained and saved, but could not be proved: {why}")


class NotProved(SpardError):
    """An adapter is not, or cannot be shown to be, what its manifest says."""

    code = "not_proved"
