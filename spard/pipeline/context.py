"""The context that every stage of a run receives, and the interfaces that callers may replace.

Among these are stores for the outputs of finished stages, which a repeated run reads instead of computing them again.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from spard.config import Asking, Recipe
from spard.config.patience import Patience
from spard.config.run_spec import RunSpec
from spard.data.chat import get_renderer
from spard.data.rows import Example
from spard.errors import Stopped
from spard.evaluation.audit import Suite
from spard.models.base import Base
from spard.models.devices import return_freed_memory
from spard.pipeline.messages import Reporter


class Outputs(Protocol):
    """JSON values, each under the name of the stage that wrote it."""

    def read(self, name: str) -> Any | None:
        """Return the value of that name, or None."""
        ...

    def write(self, name: str, value: Any) -> None:
        """Store a value under a name."""
        ...


class OutputsInMemory:
    """Outputs that last as long as the process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def read(self, name: str) -> Any | None:
        """Return a copy of the value of that name, or None."""
        return json.loads(self._values[name]) if name in self._values else None

    def write(self, name: str, value: Any) -> None:
        """Store a value as JSON text, so that this store refuses the same values as a folder does."""
        self._values[name] = json.dumps(value)


class OutputsInFolder:
    """Outputs as files `NAME.json` in a folder, each replaced atomically."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> Any | None:
        """Return the content of `NAME.json`, or None if there is no such file."""
        path = self._path(name)
        return json.loads(path.read_text()) if path.exists() else None

    def write(self, name: str, value: Any) -> None:
        """Write `NAME.json` to a temporary file and rename it."""
        # All ranks write the same outputs, so each process needs a temporary name of its own.
        aside = self._folder / f".{name}.{os.getpid()}"
        aside.write_text(json.dumps(value))
        aside.replace(self._path(name))

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def begun_identity(folder: Path) -> str | None:
    """Return the identity of the run whose outputs are in the folder, or None."""
    mark = folder / "identity"
    return mark.read_text() if mark.exists() else None


def open_outputs(folder: Path, identity: str) -> OutputsInFolder:
    """Open the outputs in `folder` if they belong to the run with this identity; else delete them and start empty."""
    if begun_identity(folder) != identity:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "identity").write_text(identity)
    return OutputsInFolder(folder)


_LOOK_S = 0.2  # between two checks for a stop


class Cache(Protocol):
    """A cache shared between runs: entries of a `kind`, each under a `key` of everything that the entry depends on."""

    def tensor(self, kind: str, key: Mapping[str, object], make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor of that key, made by `make` if there is none yet."""
        ...

    def json(self, kind: str, key: Mapping[str, object], make: Callable[[], Any]) -> Any:
        """Return the JSON value of that key, made by `make` if there is none yet."""
        ...

    def claim(self, kind: str, key: Mapping[str, object]) -> AbstractContextManager[object] | None:
        """Return a context in which no other run computes that entry; None while another run computes it."""
        ...


class NoCache:
    """A cache that stores nothing and computes every entry again."""

    def tensor(self, kind: str, key: Mapping[str, object], make: Callable[[], Tensor]) -> Tensor:
        """Make the tensor at every call."""
        return make()

    def json(self, kind: str, key: Mapping[str, object], make: Callable[[], Any]) -> Any:
        """Make the JSON value at every call."""
        return make()

    def claim(self, kind: str, key: Mapping[str, object]) -> AbstractContextManager[object] | None:
        """Let every run make the entry."""
        return nullcontext()


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """How checkpoints are taken at the ends of epochs.

    folder       folder of the released adapters, each as `step-000120/adapter`
    prompts      prompts of each suite in a checkpoint's audit; 0: checkpoints are not audited, hence never released
    taken_until  last step whose checkpoint an earlier attempt has taken
    kept         number of checkpoints that the caller keeps, the run's own result included; the others are not audited;
                 None: all are kept
    shows_last   returns True if the last checkpoints are still audited when the run is asked to stop
    """

    folder: Path
    prompts: int
    taken_until: int = 0
    kept: int | None = None
    shows_last: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class Context:
    """One run: its spec, the base model, and the destinations of its messages and outputs.

    outputs        results of stages; a stage whose result is stored is not computed again
    cache          embeddings of pools and audits of base models, shared between runs
    resume_states  folder of the training's resume states; None: training always starts from the beginning
    should_stop    returns True if the caller wants the run to end early; work done so far is saved
    processes      number of processes that train together, each on its own device
    patience       how long to wait for a judge that does not answer
    checkpoints    how checkpoints are taken at the ends of epochs; None: none are taken
    keeps_transcripts  store every prompt of the last audit with its reply
    left_out       per suite, the positions of prompts that the audit skips because the training file contains them
    leaks          per suite, sentences on its other prompts in the training data; None: not looked for yet
    mined          suites made from training rows, with these rows: several audits of a run ask them
    seconds        duration of each stage so far
    counts         amount of progress that each stage has reported
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
    leaks: Mapping[str, Sequence[str]] | None = None
    mined: dict[Asking, tuple[Sequence[Example], list[Suite]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run with "auto" values unresolved."""
        return self.run.recipe

    @property
    def limit(self) -> int:
        """The maximum number of tokens of a row."""
        return self.base.sequence_limit(self.recipe.max_seq_length)

    @property
    def system_prompt(self) -> str | None:
        """The system prompt that the trained model is audited and served with."""
        return self.recipe.defense.serving_prompt

    @property
    def rounding(self) -> dict[str, str]:
        """The part of a cache key for the base model's results beside its digest: chat rendering and 16-bit dtype."""
        # float32 is not part of the key, which keeps the cache entries of versions without this key valid.
        dtype, rendering = self.base.model.dtype, get_renderer(self.base.tokenizer).rendering
        return {"rendering": rendering.digest} | ({} if dtype == torch.float32 else {"dtype": str(dtype)})

    @property
    def public_name(self) -> str:
        """The name of the base model in the adapter's files and in the report."""
        return self.run.public_name or Path(self.run.model).name

    @contextmanager
    def time_stage(self, stage: str) -> Iterator[None]:
        """Add the duration and the progress of the block to the stage's totals; raise `Stopped` if asked to stop."""
        self.raise_if_stopped()
        started, before = time.perf_counter(), self.report.count_afresh()
        return_freed_memory()
        yield
        self.counts[stage] = self.counts.get(stage, 0) + self.report.counted - before
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + time.perf_counter() - started, 3)

    def wait(self, thing: str, seconds: float) -> None:
        """Sleep for `seconds` while `thing` does not answer; raise `Stopped` as soon as the caller asks for a stop."""
        self.report.waiting(thing)
        until = time.monotonic() + seconds
        self.raise_if_stopped()
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_S))
            self.raise_if_stopped()

    def raise_if_stopped(self) -> None:
        """Raise `Stopped` if the caller has asked for a stop; call it where the run has nothing to save."""
        if self.should_stop():
            raise Stopped("the run was asked to stop")
