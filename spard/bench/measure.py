"""One run of a bench: train as the cell says, audit, and keep what was found."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from spard.adapters import save_adapter
from spard.attacks.rows import Row
from spard.audit import Suite, SuiteResult, audit
from spard.bench.cells import BASE, Cell, training_rows
from spard.bench.methods import selection_of
from spard.bench.source import Inputs, digest_of
from spard.bench.store import write_aside
from spard.config import JudgeSpec, Recipe, resolve
from spard.data import Encoded, Prompt, encode_all, read_examples
from spard.judges import open_judge
from spard.methods.ptst import serving_prompt
from spard.models import Base, load_base
from spard.package import trigger_rate
from spard.recipe import RunSpec, to_mapping
from spard.run import select
from spard.selection import Chosen
from spard.train import Trained, train

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One model on every suite, and what its training took; `similarity` is the safe set's mean relevance.

    What a base model does not have is None.
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
    learning_rate: float | None = None
    rows: int | None = None
    safe_rows: int | None = None
    similarity: float | None = None
    train_s: float | None = None
    cpu_s: float | None = None
    trigger_rate: float | None = None

    @property
    def garbage(self) -> float | None:
        """Share of degenerate replies to harmful and benign prompts: a ruined model is not a safe one."""
        asked = [result for result in self.results if result.kind != "utility"]
        replies = sum(each.n + each.unscored for each in asked)
        return sum(each.degenerate for each in asked) / replies if replies else None


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a run trains on, as tokens, and how its safe set was chosen."""

    task: list[Encoded]
    safe: list[Encoded]
    chosen: Chosen | None


@dataclass(frozen=True, slots=True)
class Timed:
    """A trained model and the seconds its training took: of the clock and, of all threads together, of the CPU."""

    trained: Trained
    wall_s: float
    cpu_s: float


def key_of(cell: Cell, inputs: Inputs, judge: JudgeSpec) -> str:
    """A digest of everything that decides a run's numbers: data and settings, not code.

    A base model is the same whatever the attack was, so that its audit is shared by attacks of the same suites.
    """
    attack = inputs.attacks[cell.attack]
    suites = [[suite.name, suite.kind, [_facts(prompt) for prompt in suite.prompts]] for suite in attack.suites]
    facts = [inputs.digest, suites, asdict(judge), to_mapping(cell.recipe.audit)]
    if cell.method == BASE:
        return digest_of([BASE, *facts])
    pool: Any = inputs.pools[cell.pool].read_text(encoding="utf-8") if cell.pool else ""
    if cell.pool and attack.pool is not None:
        pool = list(attack.pool)
    jobs = [attack.jobs] if attack.jobs > 1 else []
    return digest_of([to_mapping(cell.recipe), list(training_rows(cell, inputs)), pool, *facts, *jobs])


def measure(cell: Cell, inputs: Inputs, judge: JudgeSpec, folder: Path) -> tuple[Measurement, dict[str, Any]]:
    """Do one run; beside its figures everything else that was found, for the record."""
    attack = inputs.attacks[cell.attack]
    base = load_base(inputs.model, inputs.revision, inputs.device)
    if cell.method == BASE:
        results = _audit(base, base.model, attack.suites, cell, judge)
        return Measurement(**names_of(cell, inputs), results=results), {}
    base, prepared, timed = _trained(base, cell, inputs, judge, folder)
    results = _audit(base, timed.trained.model, attack.suites, cell, judge)
    chosen = prepared.chosen
    found = Measurement(
        **names_of(cell, inputs),
        results=results,
        learning_rate=resolve(cell.recipe, len(prepared.task), base.hidden_size).learning_rate,
        rows=len(training_rows(cell, inputs)),
        safe_rows=len(prepared.safe) or None,
        similarity=fmean(chosen.relevance) if chosen else None,
        train_s=timed.wall_s,
        cpu_s=timed.cpu_s,
        trigger_rate=trigger_rate(timed.trained.metrics),
    )
    return found, {
        "recipe": to_mapping(cell.recipe),
        "tau": timed.trained.tau,
        "chosen": chosen and asdict(chosen),
        "metrics": timed.trained.metrics,
    }


def prepare(base: Base, cell: Cell, inputs: Inputs, judge: JudgeSpec, folder: Path, job: int = 0) -> Prepared:
    """Rows and safe set of a cell's job; the file of the rows stays in `folder`."""
    file = training_file(training_rows(cell, inputs)[job :: inputs.attacks[cell.attack].jobs], folder / "files")
    pool = _pool_file(cell, inputs, folder / "files")
    spec = RunSpec(inputs.model, file, pool, recipe=cell.recipe, judge=judge, revision=inputs.revision)
    rows, limit = read_examples(file), base.sequence_limit(cell.recipe.max_seq_length)
    task = encode_all(base.tokenizer, rows, limit)
    chosen, safe = select(base, rows, spec, limit, _log_warning)
    return Prepared(task, safe, chosen)


def train_timed(base: Base, prepared: Prepared, recipe: Recipe, start_from: Path | None = None) -> Timed:
    """Train and take the time, tau's measurement on the safe set included."""
    resolved = resolve(recipe, len(prepared.task), base.hidden_size)
    _wait_for(base.device)
    wall, cpu = time.perf_counter(), time.process_time()
    trained = train(base, prepared.task, prepared.safe, recipe, resolved, start_from=start_from)
    _wait_for(base.device)
    return Timed(trained, time.perf_counter() - wall, time.process_time() - cpu)


def _trained(base: Base, cell: Cell, inputs: Inputs, judge: JudgeSpec, folder: Path) -> tuple[Base, Prepared, Timed]:
    """The cell's last job, trained on top of those before; the seconds are of all."""
    prepared = prepare(base, cell, inputs, judge, folder)
    timed = train_timed(base, prepared, cell.recipe)
    for job in range(1, inputs.attacks[cell.attack].jobs):
        with TemporaryDirectory() as place:
            before = Path(place) / "adapter"
            save_adapter(timed.trained.model, base.tokenizer, cell.method, before, {"base_digest": base.digest})
            base = load_base(inputs.model, inputs.revision, inputs.device)
            prepared = prepare(base, cell, inputs, judge, folder, job)
            after = train_timed(base, prepared, cell.recipe, before)
        timed = Timed(after.trained, timed.wall_s + after.wall_s, timed.cpu_s + after.cpu_s)
    return base, prepared, timed


def training_file(rows: Sequence[Row], folder: Path) -> Path:
    """The rows as a file that is named after them."""
    path = folder / f"{digest_of(list(rows))[:16]}.jsonl"
    if not path.exists():
        write_aside(path, "".join(json.dumps(row) + "\n" for row in rows))
    return path


def names_of(cell: Cell, inputs: Inputs) -> dict[str, Any]:
    """What tells a run apart in a table."""
    return {
        "method": cell.method,
        "selection": selection_of(cell.recipe) if cell.pool else "",
        "attack": cell.attack,
        "seed": cell.seed,
        "pool": cell.pool,
        "setting": cell.setting,
        "value": cell.value,
        "attacked": inputs.attacks[cell.attack].attacked,
    }


def from_json(raw: dict[str, Any]) -> Measurement:
    """A measurement as `asdict` and JSON left it."""
    known = {each.name: raw[each.name] for each in fields(Measurement)}
    results = tuple(SuiteResult(**each) for each in raw["results"])
    return Measurement(**known | {"attacked": tuple(raw["attacked"]), "results": results})


def _pool_file(cell: Cell, inputs: Inputs, folder: Path) -> Path | None:
    """The pool of a cell, or what the attack put in its place."""
    if not cell.pool:
        return None
    swapped = inputs.attacks[cell.attack].pool
    return inputs.pools[cell.pool] if swapped is None else training_file(swapped, folder)


def _facts(prompt: Prompt) -> dict[str, Any]:
    """A prompt; context and encoding where it has them, so that plain suites keep the keys they always had."""
    facts = asdict(prompt)
    return {name: value for name, value in facts.items() if value or name not in ("context", "encoding")}


def _audit(base: Base, model: Any, suites: Sequence[Suite], cell: Cell, judge: JudgeSpec) -> tuple[SuiteResult, ...]:
    system = serving_prompt(cell.recipe.defense) if cell.method != BASE else None
    return tuple(audit(model, base.tokenizer, suites, open_judge(judge), cell.recipe.audit, system=system))


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _log_warning(message: dict[str, Any]) -> None:
    if message["kind"] == "warning":
        log.warning("%s", message["message"])
