"""What every stage of a run works with, and the seams where a caller puts in its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from spard.config import Recipe
from spard.config.patience import Patience
from spard.config.run_spec import RunSpec
from spard.data.chat import get_renderer
from spard.errors import Stopped
from spard.models.base import Base
from spard.pipeline.messages import Reporter
from spard.pipeline.outputs import Outputs, OutputsInMemory

_LOOK_S = 0.2  # while something is waited for


class Cache(Protocol):
    """What is shared between runs: entries of a `kind`, each under a `key` of everything that it depends on."""

    def tensor(self, kind: str, key: Mapping[str, Any], make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor of that key, made by `make` if there is none yet."""
        ...

    def json(self, kind: str, key: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """Return the JSON value of that key, made by `make` if there is none yet."""
        ...

    def claim(self, kind: str, key: Mapping[str, Any]) -> AbstractContextManager[object] | None:
        """Return a context in which no other run makes that entry; None while another one makes it."""
        ...


class NoCache:
    """Share nothing: everything is made anew."""

    def tensor(self, kind: str, key: Mapping[str, Any], make: Callable[[], Tensor]) -> Tensor:
        """Make the tensor at every call."""
        return make()

    def json(self, kind: str, key: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """Make the JSON value at every call."""
        return make()

    def claim(self, kind: str, key: Mapping[str, Any]) -> AbstractContextManager[object] | None:
        """Let every run make the entry."""
        return nullcontext()


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """What is made of the ends of epochs.

    folder       where the adapters are put that passed, each as `step-000120/adapter`
    prompts      how many of each suite a checkpoint is audited with; 0: none is audited, and so none is released
    taken_until  the last step whose checkpoint an earlier attempt has left
    kept         how many the caller keeps of a run that has ended, its own result among them: the others are not
                 audited; None: all are kept
    shows_last   whether the last ones are to be audited where the run is asked to stop
    """

    folder: Path
    prompts: int
    taken_until: int = 0
    kept: int | None = None
    shows_last: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class Context:
    """One run: what is asked, the base model, and where news and outputs go.

    outputs        of stages; one that is there already is not worked out again
    cache          embeddings of pools and audits of base models, shared between runs
    resume_states  the folder of what a killed training goes on from; None: it begins anew
    should_stop    whether the caller wants the run to end early; what was done is saved
    processes      how many train together, each on a device of its own
    patience       with a judge that does not answer
    checkpoints    what is made of the ends of epochs; None: nothing
    keeps_transcripts  every prompt of the last audit is kept with its reply
    left_out       places of the prompts of suites that the audit does without, as the training file holds them
    seconds        what each stage took so far
    counts         and how much progress it told of
    """

    run: RunSpec
    base: Base
    report: Reporter
    outputs: Outputs = field(default_factory=OutputsInMemory)
    cache: Cache = field(default_factory=NoCache)
    resume_states: Path | None = None
    should_stop: Callable[[], bool] = lambda: False
    processes: int = 1
    patience: Patience = field(default_factory=Patience)
    checkpoints: CheckpointPlan | None = None
    keeps_transcripts: bool = False
    left_out: Mapping[str, Set[int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run, as it was asked for: "auto" is not resolved yet."""
        return self.run.recipe

    @property
    def limit(self) -> int:
        """The most tokens of a row."""
        return self.base.sequence_limit(self.recipe.max_seq_length)

    @property
    def system_prompt(self) -> str | None:
        """The system prompt that the trained model is audited and served with."""
        return self.recipe.defense.serving_prompt

    @property
    def rounding(self) -> dict[str, str]:
        """What figures of the base model depend on beside its digest: how it is asked, and whether in 16 bits."""
        dtype, rendering = self.base.model.dtype, get_renderer(self.base.tokenizer).rendering
        return {"rendering": rendering.digest} | ({} if dtype == torch.float32 else {"dtype": str(dtype)})

    @property
    def public_name(self) -> str:
        """What the adapter and the report call the base model."""
        return self.run.public_name or Path(self.run.model).name

    @contextmanager
    def time_stage(self, stage: str) -> Iterator[None]:
        """Add the time of the block to its stage."""
        self.raise_if_stopped()
        started, before = time.perf_counter(), self.report.count_afresh()
        yield
        self.counts[stage] = self.counts.get(stage, 0) + self.report.counted - before
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + time.perf_counter() - started, 3)

    def wait(self, thing: str, seconds: float) -> None:
        """Wait for something that is away; `Stopped` as soon as the caller asks for it."""
        self.report.waiting(thing)
        until = time.monotonic() + seconds
        self.raise_if_stopped()
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_S))
            self.raise_if_stopped()

    def raise_if_stopped(self) -> None:
        """Raise `Stopped` when the caller has asked for it; for places where there is nothing to save."""
        if self.should_stop():
            raise Stopped("the run was asked to stop")
