"""One run of a bench: train a cell's model, audit it, and return the measurement."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from spard.config import JudgeSpec
from spard.config.earlier_versions import without_added
from spard.config.run_spec import RunSpec, to_mapping
from spard.data.rows import Prompt
from spard.evaluation.audit import Suite
from spard.evaluation.results import SuiteResult
from spard.models.adapters import save_adapter
from spard.models.base import Base, load_base
from spard.pipeline import audit, rows, train
from spard.pipeline.context import Context
from spard.pipeline.messages import Message, Reporter
from spard.pipeline.rows import Rows
from spard.pipeline.train import TrainingResult
from spard.release.figures import trigger_rate
from spard.release.records import read_record
from spard.replacement import write_atomically
from spard_lab.attacks.rows import Row
from spard_lab.bench.cells import BASE, Cell, training_rows
from spard_lab.bench.methods import UNALIGNED, selection_name
from spard_lab.bench.source import Inputs, json_digest

_PROMPT = tuple(each.name for each in fields(Prompt))
_LATER = ("context", "encoding", "tools", "prefill", "temperature", "draw")
_MARKS = {True: "1", False: "0", None: "-"}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One model's results on every suite, and the cost of its training.

    attacked    names of the suites that the attack aims at
    hits        per suite a character for each prompt: 1 a hit, 0 none, - not scored
    similarity  mean relevance of the safe set
    train_s     seconds of the training by the clock
    cpu_s       CPU seconds of the training, of all threads together

    Fields about the training are None for a base model.
    """

    method: str
    selection: str
    attack: str
    seed: int
    pool: str
    setting: str
    value: str
    attacked: tuple[str, ...]
    results: tuple[SuiteResult, ...]
    hits: Mapping[str, str] = field(default_factory=dict)
    learning_rate: float | None = None
    rows: int | None = None
    safe_rows: int | None = None
    similarity: float | None = None
    train_s: float | None = None
    cpu_s: float | None = None
    trigger_rate: float | None = None

    @property
    def garbage(self) -> float | None:
        """The share of degenerate replies to harmful and benign prompts: a ruined model is not a safe one."""
        asked = [result for result in self.results if result.kind != "utility"]
        replies = sum(each.n + each.unscored for each in asked)
        return sum(each.degenerate for each in asked) / replies if replies else None


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run of the pipeline before its training, and its encoded rows."""

    context: Context
    rows: Rows


@dataclass(frozen=True, slots=True)
class TrainingTime:
    """A trained model and the seconds of its training, by the clock and of the CPU (all threads together)."""

    tuned: TrainingResult
    wall_s: float
    cpu_s: float


def run_key(cell: Cell, inputs: Inputs, judge: JudgeSpec) -> str:
    """Return a digest of everything that determines a run's numbers: data and settings, not code.

    A base model does not depend on the attack, so attacks with the same suites share its audit.
    """
    attack = inputs.attacks[cell.attack]
    suites = [[suite.name, suite.kind, [_facts(prompt) for prompt in suite.prompts]] for suite in attack.suites]
    facts = [inputs.digest, suites, asdict(judge), to_mapping(cell.recipe.audit)]
    if cell.method == BASE:
        return json_digest([BASE, *facts])
    pool: Any = inputs.pools[cell.pool].read_text(encoding="utf-8") if cell.pool else ""
    if cell.pool and attack.pool is not None:
        pool = list(attack.pool)
    # Defaults are left out of the key: runs stored before these settings existed keep theirs.
    jobs = [attack.jobs] if attack.jobs > 1 else []
    beside = jobs if cell.row_signal.action == "off" else [*jobs, {"row_signal": asdict(cell.row_signal)}]
    return json_digest(
        [without_added(to_mapping(cell.recipe)), list(training_rows(cell, inputs)), pool, *facts, *beside]
    )


def read_run(folder: Path, key: str) -> dict[str, Any] | None:
    """Return a stored run, or None."""
    path = _run_file(folder, key)
    found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return found


def write_run(folder: Path, key: str, found: dict[str, Any]) -> None:
    """Store a run in a JSON file that is named after its key, replacing one with the same key."""
    write_atomically(_run_file(folder, key), json.dumps(found, indent=1) + "\n")


def _run_file(folder: Path, key: str) -> Path:
    return folder / "runs" / f"{key[:24]}.json"


def measure(cell: Cell, inputs: Inputs, judge: JudgeSpec, folder: Path) -> tuple[Measurement, dict[str, Any]]:
    """Do one run; return its measurement and further facts for the record."""
    base, suites = load_base(inputs.model, inputs.revision, inputs.device), inputs.attacks[cell.attack].suites
    if cell.method == BASE:
        context = Context(_run_spec(cell, inputs, judge, folder), base, Reporter(_log_warning))
        return Measurement(**run_names(cell, inputs), **_audit_model(context, suites)), {}
    prepared, timed = _train_jobs(prepare(base, cell, inputs, judge, folder), cell, inputs, judge, folder)
    trained, selected = timed.tuned.trained, prepared.rows.selected
    found = Measurement(
        **run_names(cell, inputs),
        **_audit_model(prepared.context, suites, trained.model),
        learning_rate=timed.tuned.resolved.learning_rate,
        rows=len(training_rows(cell, inputs)),
        safe_rows=len(prepared.rows.safe) or None,
        similarity=fmean(selected.relevance) if selected else None,
        train_s=timed.wall_s,
        cpu_s=timed.cpu_s,
        trigger_rate=trigger_rate(trained.metrics),
    )
    return found, {
        "recipe": to_mapping(cell.recipe),
        "weights": audit.weights_digest(trained.model),
        "tau": trained.tau,
        "chosen": selected and to_mapping(selected),
        "metrics": trained.metrics,
    }


def prepare(base: Base, cell: Cell, inputs: Inputs, judge: JudgeSpec, folder: Path, job: int = 0) -> PreparedRun:
    """Read the rows of a cell's job and select its safe set; the file of the rows is written to `folder`.

    The model before its alignment is made first if the cell's defense needs it.
    """
    if inputs.make_unaligned and UNALIGNED in cell.recipe.defense.models:
        inputs.make_unaligned()
    context = Context(_run_spec(cell, inputs, judge, folder, job), base, Reporter(_log_warning))
    return PreparedRun(context, rows.prepare(context))


def train_timed(prepared: PreparedRun) -> TrainingTime:
    """Train and take the time, which includes measuring tau on the safe set."""
    device = prepared.context.base.device
    _synchronize(device)
    # GPU work is asynchronous: wait for it before the clocks start and before they stop.
    wall, cpu = time.perf_counter(), time.process_time()
    tuned = train.run(prepared.context, prepared.rows)
    _synchronize(device)
    return TrainingTime(tuned, time.perf_counter() - wall, time.process_time() - cpu)


def _train_jobs(
    prepared: PreparedRun, cell: Cell, inputs: Inputs, judge: JudgeSpec, folder: Path
) -> tuple[PreparedRun, TrainingTime]:
    """Train the cell's jobs, each on top of the one before; return the last, with the seconds of all."""
    timed = train_timed(prepared)
    for job in range(1, inputs.attacks[cell.attack].jobs):
        with TemporaryDirectory() as place:
            before, base = Path(place) / "adapter", prepared.context.base
            save_adapter(timed.tuned.trained.model, base, cell.method, before, {"base_digest": base.digest})
            fresh = load_base(inputs.model, inputs.revision, inputs.device)
            prepared = prepare(fresh, cell, inputs, judge, folder, job)
            run = replace(prepared.context.run, start_from=before)
            after = train_timed(replace(prepared, context=replace(prepared.context, run=run)))
        timed = TrainingTime(after.tuned, timed.wall_s + after.wall_s, timed.cpu_s + after.cpu_s)
    return prepared, timed


def _audit_model(context: Context, suites: Sequence[Suite], model: Any = None) -> dict[str, Any]:
    """Audit a model; return the fields `results` and `hits` of a measurement."""
    found = audit.measure_each(context, suites, model)
    return {
        "results": tuple(each.result for each in found),
        "hits": {each.result.suite: "".join(_MARKS[item.hit] for item in each.items) for each in found},
    }


def _run_spec(cell: Cell, inputs: Inputs, judge: JudgeSpec, folder: Path, job: int = 0) -> RunSpec:
    """Return the run spec of one of a cell's jobs; its files are written to `folder`."""
    own = training_rows(cell, inputs)[job :: inputs.attacks[cell.attack].jobs]
    return RunSpec(
        model=inputs.model,
        revision=inputs.revision,
        training_file=training_file(own, folder / "files"),
        pool=_pool_file(cell, inputs, folder / "files"),
        recipe=cell.recipe,
        judge=judge,
        row_signal=cell.row_signal,
    )


def training_file(examples: Sequence[Row], folder: Path) -> Path:
    """Write rows to a file named after their digest, and return its path."""
    path = folder / f"{json_digest(list(examples))[:16]}.jsonl"
    if not path.exists():
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in examples))
    return path


def run_names(cell: Cell, inputs: Inputs) -> dict[str, Any]:
    """Return the fields that identify a run in a table."""
    return {
        "method": cell.method,
        "selection": selection_name(cell.recipe) if cell.pool else "",
        "attack": cell.attack,
        "seed": cell.seed,
        "pool": cell.pool,
        "setting": cell.setting,
        "value": cell.value,
        "attacked": inputs.attacks[cell.attack].attacked,
    }


def from_json(raw: dict[str, Any]) -> Measurement:
    """Return a measurement from the JSON of its `asdict`."""
    known = {each.name: raw[each.name] for each in fields(Measurement) if each.name in raw}
    results = tuple(read_record(SuiteResult, each) for each in raw["results"])
    return Measurement(**known | {"attacked": tuple(raw["attacked"]), "results": results})


def _pool_file(cell: Cell, inputs: Inputs, folder: Path) -> Path | None:
    """Return the pool of a cell, or the attack's pool in its place."""
    if not cell.pool:
        return None
    swapped = inputs.attacks[cell.attack].pool
    return inputs.pools[cell.pool] if swapped is None else training_file(swapped, folder)


def _facts(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt as JSON, without empty fields that were added later: digests of older suites stay the same."""
    facts = ((name, getattr(prompt, name)) for name in _PROMPT)  # `asdict` copies deeply: seconds for a table's prompts
    return {name: value for name, value in facts if value or name not in _LATER}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _log_warning(message: Message) -> None:
    if message["kind"] == "warning":
        log.warning("%s", message["message"])
