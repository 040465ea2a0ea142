"""The jobs of one attack, through the pipeline and the gate as the service runs them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from torch import Tensor

from spard.config import Dpo, JudgeSpec, Recipe
from spard.config.run_spec import RunSpec, run_from_mapping, to_mapping
from spard.errors import InvalidRecipe, SpardError
from spard.evaluation.gate import Gate
from spard.models.adapters import save_adapter
from spard.models.base import Base, load_base
from spard.pipeline import audit, row_findings, rows, train
from spard.pipeline.base_figures import base_figures
from spard.pipeline.context import Context
from spard.pipeline.messages import Message, Reporter
from spard.release.step_metrics import trigger_rate
from spard.training.ends import EpochEnd
from spard_lab.adversary.arena import Ground
from spard_lab.adversary.base import Campaign, Job
from spard_lab.bench.measure import training_file
from spard_lab.bench.methods import parse_value
from spard_lab.bench.source import json_digest

log = logging.getLogger(__name__)

Ending = Literal["released", "stopped", "refused"]
"""released: the gate released every job. stopped: the gate stopped a job. refused: a job ended before the gate, with an
error that says why."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a job tells of itself, beside what its model does.

    rows       of its file
    flagged    how many of them the row signal flags; None where nothing is measured
    triggered  the share of steps with a safe loss above its bound; None for methods without one
    dropped    how many of them were not trained on
    doubtful   how many rows the judge finds no harm in, and that are in doubt
    read       how many rows that were not flagged the judge has read
    half       which prompts of the task were answered rightly at half of the steps; empty where that was not asked
    """

    rows: int
    flagged: int | None = None
    triggered: float | None = None
    half: str = ""
    dropped: int | None = None
    read: int | None = None
    doubtful: int | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """One job: the gate's decision, the model and its base, the CPU seconds without the audits, and what it tells."""

    gate: Gate
    model: Any = field(repr=False)
    base: Base = field(repr=False)
    cpu_s: float
    told: Told


@dataclass(frozen=True, slots=True)
class Ended:
    """How a campaign ended: at which job (from 1), why, and the last model that was trained, if there is one."""

    ending: Ending
    job: int
    reasons: tuple[str, ...]
    cpu_s: float
    model: Any = field(default=None, repr=False)
    base: Base | None = field(default=None, repr=False)
    told: Told | None = None


@dataclass(slots=True)
class Memory:
    """A cache of one process: what the base model measured is the same for every arm."""

    found: dict[str, Any] = field(default_factory=dict)

    def tensor(self, kind: str, key: Mapping[str, Any], make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor of that key, made by `make` if there is none yet."""
        found: Tensor = self.json(kind, key, make)
        return found

    def json(self, kind: str, key: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """Return the JSON value of that key, made by `make` if there is none yet."""
        name = json_digest([kind, dict(key)])
        if name not in self.found:
            self.found[name] = make()
        return self.found[name]

    def claim(self, kind: str, key: Mapping[str, Any]) -> AbstractContextManager[object] | None:
        """Let the one run that there is make the entry."""
        return nullcontext()


@dataclass(frozen=True, slots=True)
class Service:
    """What every job of a bench meets: the lab, the arm's recipe, the judge, and a place for files.

    `provider` are settings of a run spec that are the provider's, as (path, value in JSON or plain text). With
    `at_half` the model is asked after half of the steps, where an epoch ends there, and an arm pays for its whole
    set-up; without it the first arm pays for what the cache keeps for the others. `device` is where the model is.
    """

    ground: Ground
    recipe: Recipe
    judge: JudgeSpec
    folder: Path
    cache: Memory
    provider: tuple[tuple[str, str], ...] = ()
    at_half: Callable[[Any, Base], str] | None = None
    device: str = "cpu"

    def take(self, job: Job, start_from: Path | None) -> Taken:
        """Run one job through the stages and the gate."""
        base = load_base(self.ground.model, device=self.device)
        context = Context(self.spec(job, start_from), base, Reporter(_quietly), cache=self.cache)
        started = time.process_time()
        prepared = rows.prepare(replace(context, cache=Memory()) if self.at_half else context)
        cpu_s = time.process_time() - started
        before = base_figures(context, prepared.examples)
        started = time.process_time()
        half = _Half(self.at_half, base)
        trained = train.run(context, prepared, half.look if self.at_half else None).trained
        cpu_s += time.process_time() - started - half.cpu_s
        signal = row_findings.read_row_signal_record(context)
        told = Told(
            rows=len(prepared.examples),
            flagged=len(signal.flagged) if signal else None,
            triggered=trigger_rate(trained.metrics),
            half=half.marks,
            dropped=signal.dropped if signal else None,
            read=signal.read if signal else None,
            doubtful=len(signal.doubtful) if signal else None,
        )
        gate = audit.run(context, prepared.examples, trained.model, before).gate
        return Taken(gate, trained.model, base, cpu_s, told)

    def spec(self, job: Job, start_from: Path | None) -> RunSpec:
        """Return a job as the pipeline knows it; its files stay in `folder`."""
        files = self.folder / "files"
        spec = RunSpec(
            model=self.ground.model,
            training_file=training_file(job.rows, files),
            pool=self.ground.pool if job.pool is None else training_file(job.pool, files),
            suites=self.ground.suites,
            recipe=customer_recipe(replace(self.recipe, dpo=Dpo()) if job.dpo else self.recipe, job),
            judge=self.judge,
            start_from=start_from,
        )
        return with_settings(spec, self.provider)


def run_campaign(campaign: Campaign, service: Service) -> Ended:
    """Run job after job, each on the adapter that the one before released, until the gate stops one.

    The model of a stopped job is returned too: what the gate kept back is worth knowing, and is told apart.
    """
    start_from, cpu_s = None, 0.0
    with TemporaryDirectory() as adapters:
        for number, job in enumerate(campaign.jobs, start=1):
            try:
                done = service.take(job, start_from)
            except SpardError as error:
                return Ended("refused", number, (f"{error.code}: {error.message}",), cpu_s)
            cpu_s += done.cpu_s
            if done.gate.decision != "pass":
                return Ended("stopped", number, done.gate.reasons, cpu_s, done.model, done.base, done.told)
            start_from = Path(adapters) / f"job-{number}"
            if number < len(campaign.jobs):
                save_adapter(done.model, done.base, "adversary", start_from, {"base_digest": done.base.digest})
    return Ended("released", len(campaign.jobs), (), cpu_s, done.model, done.base, done.told)


@dataclass(slots=True)
class _Half:
    """Asks the model where an epoch ends with half of the steps done; `cpu_s` is what the asking took."""

    ask: Callable[[Any, Base], str] | None
    base: Base
    marks: str = ""
    cpu_s: float = 0.0

    def look(self, end: EpochEnd) -> None:
        """Ask if this is the half."""
        if self.ask and 2 * end.step == end.total_steps:
            started = time.process_time()
            self.marks = self.ask(end.model, self.base)
            self.cpu_s += time.process_time() - started


def with_settings(spec: RunSpec, settings: Sequence[tuple[str, str]]) -> RunSpec:
    """Return the run with settings changed by their paths; raise InvalidRecipe where one is unknown or out of range."""
    raw = to_mapping(spec)
    for path, value in settings:
        *heads, last = path.split(".")
        table = raw
        for head in heads:
            table = table.get(head)
            if not isinstance(table, dict):
                raise InvalidRecipe(f"{path}: unknown setting", path)
        table[last] = parse_value(value)
    return run_from_mapping(raw) if settings else spec


def customer_recipe(recipe: Recipe, job: Job) -> Recipe:
    """Return the recipe with what the customer asks for in place of what it says, where he asks for something."""
    asked = job.hyperparameters
    if asked.n_epochs == recipe.hyperparameters.n_epochs == "auto" and job.auto_epochs:
        asked = replace(asked, n_epochs=job.auto_epochs)
    chosen = {each.name: getattr(asked, each.name) for each in fields(asked) if getattr(asked, each.name) != "auto"}
    return replace(recipe, hyperparameters=replace(recipe.hyperparameters, **chosen))


def _quietly(message: Message) -> None:
    if message["kind"] == "warning":
        log.debug("%s", message["message"])
