"""The jobs of one attack, through the pipeline and the gate as the service runs them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from torch import Tensor

from spard.config import Dpo, Hyperparameters, JudgeSpec, Recipe
from spard.config.run_spec import RunSpec, run_from_mapping, to_mapping
from spard.errors import InvalidRecipe, SpardError
from spard.evaluation.gate import Gate
from spard.models.adapters import save_adapter
from spard.models.base import Base, load_base
from spard.pipeline import audit, rows, train
from spard.pipeline.context import Context
from spard.pipeline.messages import Message, Reporter
from spard.research.adversary.arena import Ground
from spard.research.adversary.base import Campaign, Job
from spard.research.bench.measure import training_file
from spard.research.bench.methods import value_of
from spard.research.bench.source import digest_of

log = logging.getLogger(__name__)

Ending = Literal["released", "stopped", "refused"]
"""The gate released every job; it stopped one; a job ended before the gate, with an error that says why."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a campaign ended: at which job (from 1), why, and the last model that was trained, if there is one."""

    ending: Ending
    job: int
    reasons: tuple[str, ...]
    cpu_s: float
    model: Any = field(default=None, repr=False)
    base: Base | None = field(default=None, repr=False)


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
        name = digest_of([kind, dict(key)])
        if name not in self.found:
            self.found[name] = make()
        return self.found[name]


@dataclass(frozen=True, slots=True)
class Service:
    """What every job of a bench meets: the lab, the arm's recipe, the judge, and a place for files.

    `provider` are settings of a run spec that are the provider's, as (path, value in JSON or plain text).
    """

    ground: Ground
    recipe: Recipe
    judge: JudgeSpec
    folder: Path
    cache: Memory
    provider: tuple[tuple[str, str], ...] = ()

    def take(self, job: Job, start_from: Path | None) -> tuple[Gate, Any, Base, float]:
        """Run one job; return the gate's decision, the model, its base, and the CPU seconds without the audits."""
        base = load_base(self.ground.model, device="cpu")
        context = Context(self._spec(job, start_from), base, Reporter(_quietly), cache=self.cache)
        started = time.process_time()
        prepared = rows.prepare(context)
        cpu_s = time.process_time() - started
        before = audit.measure_base(context, prepared.examples)
        started = time.process_time()
        model = train.run(context, prepared).trained.model
        cpu_s += time.process_time() - started
        return audit.run(context, prepared.examples, model, before).gate, model, base, cpu_s

    def _spec(self, job: Job, start_from: Path | None) -> RunSpec:
        files = self.folder / "files"
        spec = RunSpec(
            model=self.ground.model,
            training_file=training_file(job.rows, files),
            pool=self.ground.pool if job.pool is None else training_file(job.pool, files),
            suites=self.ground.suites,
            recipe=settings_of(replace(self.recipe, dpo=Dpo()) if job.dpo else self.recipe, job.hyperparameters),
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
                gate, model, base, seconds = service.take(job, start_from)
            except SpardError as error:
                return Ended("refused", number, (f"{error.code}: {error.message}",), cpu_s)
            cpu_s += seconds
            if gate.decision != "pass":
                return Ended("stopped", number, gate.reasons, cpu_s, model, base)
            start_from = Path(adapters) / f"job-{number}"
            if number < len(campaign.jobs):
                save_adapter(model, base, "adversary", start_from, {"base_digest": base.digest})
    return Ended("released", len(campaign.jobs), (), cpu_s, model, base)


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
        table[last] = value_of(value)
    return run_from_mapping(raw) if settings else spec


def settings_of(recipe: Recipe, asked: Hyperparameters) -> Recipe:
    """Return the recipe with what the customer asks for in place of what it says, where he asks for something."""
    chosen = {each.name: getattr(asked, each.name) for each in fields(asked) if getattr(asked, each.name) != "auto"}
    return replace(recipe, hyperparameters=replace(recipe.hyperparameters, **chosen))


def _quietly(message: Message) -> None:
    if message["kind"] == "warning":
        log.debug("%s", message["message"])
