"""A whole run in one process: embed, select, train, audit, package. The library's way without the service."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from spard.adapters import save_adapter
from spard.archive import archive
from spard.audit import Suite, SuiteResult, audit
from spard.config import Resolved, resolve
from spard.data import (
    Encoded,
    Example,
    encode_all,
    encode_to_train,
    prompt_text,
    read_examples,
    read_pool,
    read_prompts,
)
from spard.embed import embed
from spard.gate import gate
from spard.judges import open_judge
from spard.leaks import leaks_of
from spard.losses import Evaluation, evaluate
from spard.methods.base import Metrics
from spard.methods.ptst import serving_prompt
from spard.mined_suites import mined_suites
from spard.models import Base, load_base
from spard.package import Measured, metrics_csv, safety_report, trigger_rate
from spard.recipe import RunSpec, to_mapping
from spard.safe_set import safe_set
from spard.selection import Chosen, choose
from spard.train import Trained, train

Report = Callable[[dict[str, Any]], None]  # one JSON-able message at a time, each with a "kind"
UNBOUNDED = 2**31


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run found; its files lie in the folder it was given."""

    chosen: Chosen | None
    trained: Trained
    measured: Measured
    leaks: Mapping[str, Sequence[str]]  # by suite, what of it was trained on


def run(spec: RunSpec, out: Path, report: Report) -> Outcome:
    """Fine-tune, measure before and after, and leave adapter, archive, metrics and safety report in `out`.

    Checkpoints lie in `out` too while it trains: the same call after a crash goes on from the newest.
    """
    base = load_base(spec.model, spec.revision)
    rows = read_examples(spec.training_file)
    limit = base.sequence_limit(spec.recipe.max_seq_length)
    task = encode_to_train(base.tokenizer, rows, limit)
    held_out = read_examples(spec.validation_file) if spec.validation_file else []
    validation = encode_to_train(base.tokenizer, held_out, limit)
    resolved = resolve(spec.recipe, len(task), base.hidden_size)
    tokens = resolved.n_epochs * sum(len(row.ids) for row in task)
    report({"kind": "resolved", "data": asdict(resolved), "trained_tokens": tokens})

    leaks = leaks_of(spec)
    for reason in chain.from_iterable(leaks.values()):
        report({"kind": "warning", "message": reason})
    chosen, safe = select(base, rows, spec, limit, report)
    suites = suites_of(spec, rows)
    before = measure(base, base.model, suites, spec, report)  # first: full fine-tuning changes the base model in place

    report({"kind": "phase", "phase": "train"})
    on_step = partial(_report_step, report)
    checkpoints = out / "checkpoints"
    trained = train(
        base, task, safe, spec.recipe, resolved, on_step=on_step, start_from=spec.start_from, checkpoints=checkpoints
    )

    after = measure(base, trained.model, suites, spec, report, serving_prompt(spec.recipe.defense))
    measured = Measured(before, after, gate(before, after, spec.thresholds, leaks))
    valid = evaluate(base.model, validation, base.tokenizer.pad_token_id) if validation else None

    report({"kind": "phase", "phase": "package"})
    _package(base, spec, resolved, Outcome(chosen, trained, measured, leaks), valid, out)
    shutil.rmtree(checkpoints, ignore_errors=True)
    report({"kind": "done"})
    return Outcome(chosen, trained, measured, leaks)


def select(
    base: Base, rows: Sequence[Example], spec: RunSpec, limit: int, report: Report
) -> tuple[Chosen | None, list[Encoded]]:
    """The safe set that the recipe's selection takes from the pool rows within the limit, as tokens."""
    if not spec.recipe.uses_pool or spec.pool is None:
        return None, []
    report({"kind": "phase", "phase": "embed"})
    pool = read_pool(spec.pool)
    encoded = encode_all(base.tokenizer, pool, UNBOUNDED)
    fits = [i for i, row in enumerate(encoded) if len(row.ids) <= limit]
    if len(fits) < len(pool):
        report({"kind": "warning", "message": f"{len(pool) - len(fits)} pool rows exceed {limit} tokens"})
    pool_ND = embed(base, [prompt_text(pool[i]) for i in fits])
    task_MD = embed(base, [prompt_text(row) for row in rows])

    report({"kind": "phase", "phase": "select"})
    k = spec.recipe.selection.size(len(rows), len(fits))
    chosen = choose(pool_ND, task_MD, k, spec.recipe.selection, spec.recipe.seed)
    examples = [pool[fits[i]] for i in chosen.indices]
    return chosen, safe_set(base, examples, rows, spec.recipe, spec.judge, limit)


def suites_of(spec: RunSpec, rows: Sequence[Example]) -> list[Suite]:
    """The recipe's suites, none asked for meaning all there are, and those that the customer's rows give rise to."""
    wanted = spec.recipe.audit.suites
    specs = [each for each in spec.suites if wanted is None or each.name in wanted]
    suites = [Suite(each.name, each.kind, tuple(read_prompts(each.path))) for each in specs]
    return [*suites, *mined_suites(suites, rows)]


def measure(
    base: Base, model: Any, suites: Sequence[Suite], spec: RunSpec, report: Report, system: str | None = None
) -> list[SuiteResult]:
    """Audit one model as it is served."""
    report({"kind": "phase", "phase": "audit"})
    return audit(model, base.tokenizer, suites, open_judge(spec.judge), spec.recipe.audit, system=system)


def _report_step(report: Report, step: int, total_steps: int, metrics: Metrics) -> None:
    report({"kind": "metrics", "step": step, "total_steps": total_steps, "data": metrics})


def _package(
    base: Base, spec: RunSpec, resolved: Resolved, outcome: Outcome, valid: Evaluation | None, out: Path
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    facts: Mapping[str, Any] = {
        "recipe": to_mapping(spec.recipe),
        "resolved": asdict(resolved),
        "base_digest": base.digest,
        "tau": outcome.trained.tau,
        "trigger_rate": trigger_rate(outcome.trained.metrics),
        "selected": outcome.chosen and asdict(outcome.chosen),
        "leaks": outcome.leaks,
    }
    safety = json.dumps(safety_report(outcome.measured, facts), indent=2) + "\n"
    (out / "safety.json").write_text(safety)
    (out / "metrics.csv").write_text(metrics_csv(outcome.trained.metrics, valid))
    public = spec.public_name or Path(spec.model).name
    system = serving_prompt(spec.recipe.defense)
    save_adapter(outcome.trained.model, base.tokenizer, public, out / "adapter", facts, system)
    archive(out / "adapter", out / "adapter.tar.gz")
