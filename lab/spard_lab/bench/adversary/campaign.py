"""Run the jobs of one attack through the pipeline and the gate, as the service does."""

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
from spard.pipeline import audit, row_judging, rows, train
from spard.pipeline.base_figures import base_figures
from spard.pipeline.context import Context
from spard.pipeline.messages import Message, Reporter
from spard.release.figures import trigger_rate
from spard.training.epoch_ends import EpochEnd
from spard_lab.adversary.base import Campaign, Ground, Job
from spard_lab.bench.measure import training_file
from spard_lab.bench.methods import parse_value
from spard_lab.bench.source import json_digest

log = logging.getLogger(__name__)

Ending = Literal["released", "stopped", "refused"]
"""released: the gate released every job. stopped: the gate stopped a job. refused: a job ended before the gate, with an
error that says why."""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """Facts about a job, beside its model's behavior.

    rows       rows of its file
    flagged    rows that the row signal flags; None if it is off
    triggered  share of steps with a safe loss above its bound; None for methods without one
    half       outcomes on the task at half of the steps, as in `Answers.right`; empty if not asked
    dropped    rows that the row signal left out of the training
    read       unflagged rows that the judge has read
    doubtful   rows in which the judge finds no harm but that remain in doubt
    """

    rows: int
    flagged: int | None = None
    triggered: float | None = None
    half: str = ""
    dropped: int | None = None
    read: int | None = None
    doubtful: int | None = None


@dataclass(frozen=True, slots=True)
class JobResult:
    """One job's result: the gate's decision, the model and its base, CPU seconds without audits, and facts."""

    gate: Gate
    model: Any = field(repr=False)
    base: Base = field(repr=False)
    cpu_s: float
    told: JobFacts


@dataclass(frozen=True, slots=True)
class CampaignEnd:
    """The end of a campaign: how, at which job (from 1), the reasons, and the last trained model, if any."""

    ending: Ending
    job: int
    reasons: tuple[str, ...]
    cpu_s: float
    model: Any = field(default=None, repr=False)
    base: Base | None = field(default=None, repr=False)
    told: JobFacts | None = None


@dataclass(slots=True)
class Memory:
    """A cache for one process: measurements of the base model are shared by all arms."""

    found: dict[str, Any] = field(default_factory=dict)

    def tensor(self, kind: str, key: Mapping[str, Any], make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor of a key; call `make` if it is missing."""
        found: Tensor = self.json(kind, key, make)
        return found

    def json(self, kind: str, key: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """Return the JSON value of a key; call `make` if it is missing."""
        name = json_digest([kind, dict(key)])
        if name not in self.found:
            self.found[name] = make()
        return self.found[name]

    def claim(self, kind: str, key: Mapping[str, Any]) -> AbstractContextManager[object] | None:
        """Return a context in which to make an entry; a single run never has to wait."""
        return nullcontext()


@dataclass(frozen=True, slots=True)
class Service:
    """The environment of every job of a bench: the lab, the arm's recipe, the judge, and a folder for files.

    provider  the provider's settings of the run spec, as (path, value in JSON or plain text)
    at_half   asks the model after half of the steps, if an epoch ends there; the arm then pays for its whole set-up
    device    device of the model

    Without `at_half`, the first arm pays for the set-up that the cache keeps for the others.
    """

    ground: Ground
    recipe: Recipe
    judge: JudgeSpec
    folder: Path
    cache: Memory
    provider: tuple[tuple[str, str], ...] = ()
    at_half: Callable[[Any, Base], str] | None = None
    device: str = "cpu"

    def take(self, job: Job, start_from: Path | None) -> JobResult:
        """Run one job through all stages and the gate."""
        base = load_base(self.ground.model, device=self.device)
        context = Context(self.spec(job, start_from), base, Reporter(_quietly), cache=self.cache)
        started = time.process_time()
        # An empty cache, so that the CPU seconds include the whole set-up.
        prepared = rows.prepare(replace(context, cache=Memory()) if self.at_half else context)
        cpu_s = time.process_time() - started
        before = base_figures(context, prepared.examples)
        started = time.process_time()
        half = _Half(self.at_half, base)
        trained = train.run(context, prepared, half if self.at_half else None).trained
        cpu_s += time.process_time() - started - half.cpu_s
        signal = row_judging.read_row_signal_record(context)
        told = JobFacts(
            rows=len(prepared.examples),
            flagged=len(signal.flagged) if signal else None,
            triggered=trigger_rate(trained.metrics),
            half=half.marks,
            dropped=signal.dropped if signal else None,
            read=signal.read if signal else None,
            doubtful=len(signal.doubtful) if signal else None,
        )
        gate = audit.run(context, prepared.examples, trained.model, before).gate
        return JobResult(gate, trained.model, base, cpu_s, told)

    def spec(self, job: Job, start_from: Path | None) -> RunSpec:
        """Return the run spec of a job; its files are written to `folder`."""
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


def run_campaign(campaign: Campaign, service: Service) -> CampaignEnd:
    """Run the jobs in order, each on the adapter that the last one released, until the gate stops one.

    The model of a stopped job is returned too, with the ending "stopped".
    """
    start_from, cpu_s = None, 0.0
    with TemporaryDirectory() as adapters:
        for number, job in enumerate(campaign.jobs, start=1):
            try:
                done = service.take(job, start_from)
            except SpardError as error:
                return CampaignEnd("refused", number, (f"{error.code}: {error.message}",), cpu_s)
            cpu_s += done.cpu_s
            if done.gate.decision != "pass":
                return CampaignEnd("stopped", number, done.gate.reasons, cpu_s, done.model, done.base, done.told)
            start_from = Path(adapters) / f"job-{number}"
            if number < len(campaign.jobs):
                save_adapter(done.model, done.base, "adversary", start_from, {"base_digest": done.base.digest})
    return CampaignEnd("released", len(campaign.jobs), (), cpu_s, done.model, done.base, done.told)


@dataclass(slots=True)
class _Half:
    """Asks the model at the epoch end at half of the steps; `cpu_s` is the time of the asking."""

    ask: Callable[[Any, Base], str] | None
    base: Base
    marks: str = ""
    cpu_s: float = 0.0

    def run(self, end: EpochEnd) -> None:
        """Ask the model if half of the steps are done."""
        if self.ask and 2 * end.step == end.total_steps:
            started = time.process_time()
            self.marks = self.ask(end.model, self.base)
            self.cpu_s += time.process_time() - started


def with_settings(spec: RunSpec, settings: Sequence[tuple[str, str]]) -> RunSpec:
    """Return the run with settings changed by path; raise `InvalidRecipe` for an unknown path or an invalid value."""
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
    """Return the recipe with the hyperparameters that the customer sets."""
    asked = job.hyperparameters
    if asked.n_epochs == recipe.hyperparameters.n_epochs == "auto" and job.auto_epochs:
        asked = replace(asked, n_epochs=job.auto_epochs)
    chosen = {each.name: getattr(asked, each.name) for each in fields(asked) if getattr(asked, each.name) != "auto"}
    return replace(recipe, hyperparameters=replace(recipe.hyperparameters, **chosen))


def _quietly(message: Message) -> None:
    if message["kind"] == "warning":
        log.debug("%s", message["message"])
