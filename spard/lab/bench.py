"""Attack and defend the lab's base models over several seeds, and say how far the figures can be trusted.

Every seed has its own words in every split, its own base model, its own order of the rows and its own start of the
adapter. A table's mean therefore speaks about labs in general, with the Student interval of the seeds behind it; a
single run's rate carries the Wilson interval of its prompts.
"""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from spard.audit import SuiteResult, audit
from spard.config import Audit, Defense, Lisa, NoDefense, Recipe, SafeGrad, SafeInstr, Spard, resolve
from spard.data import encode_all, read_examples
from spard.judges.refusal import RefusalJudge
from spard.lab.make import make
from spard.lab.suites import Split, load_suites
from spard.models import load_base
from spard.package import trigger_rate
from spard.recipe import RunSpec
from spard.run import select
from spard.train import train

log = logging.getLogger(__name__)

BASE, RECIPE = "base", Recipe()
DEFENSES: dict[str, Defense] = {
    "none": NoDefense(),
    "spard": Spard(),
    "trust_region": Spard(variant="trust_region", anchor_weight=0.0),
    "gated": Spard(variant="gated", anchor_weight=0.0),
    "preconditioned": Spard(variant="preconditioned", anchor_weight=0.0),
    "closed_form": Spard(variant="closed_form"),
    "reference": Spard(variant="reference"),
    "safeinstr": SafeInstr(),
    "lisa": Lisa(),
    "safegrad": SafeGrad(),
}

# Quantile 0.975 of Student's distribution for 1, 2, ... degrees of freedom; 1.96 beyond.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One model of one seed on every suite; `train_s` and `trigger_rate` are those of its training, if any."""

    seed: int
    method: str
    results: tuple[SuiteResult, ...]
    train_s: float | None = None
    trigger_rate: float | None = None

    @property
    def garbage(self) -> float:
        """Share of degenerate replies to harmful and benign prompts: a ruined model is not a safe one."""
        asked = [result for result in self.results if result.kind != "utility"]
        return sum(each.degenerate for each in asked) / sum(each.n + each.unscored for each in asked)


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean of one figure over the seeds, its standard deviation, and the mean's 95 % interval."""

    mean: float
    sd: float | None
    low: float | None
    high: float | None


def bench(folder: Path, seeds: Sequence[int], methods: Sequence[str], split: Split) -> list[Measurement]:
    """Make each seed's lab in `folder` and run every method on its poisoned rows.

    results.json and results.md are written after every seed, so that what was measured outlives a crash.
    """
    found: list[Measurement] = []
    for seed in seeds:
        lab = folder / f"seed-{seed}"
        make(lab, seed)
        found.append(measure_base(lab, seed, split))
        for method in methods:
            found.append(measure(lab, seed, method, split))
            log.info("seed %d, %s: %s", seed, method, {each.suite: each.rate for each in found[-1].results})
        _write(folder, found, methods, split)
    return found


def measure_base(lab: Path, seed: int, split: Split) -> Measurement:
    """The base model of a lab, before anybody attacked it."""
    base = load_base(lab / "model", device="cpu")
    results = audit(base.model, base.tokenizer, load_suites(lab, split), RefusalJudge(), Audit())
    return Measurement(seed, BASE, tuple(results))


def measure(lab: Path, seed: int, method: str, split: Split, recipe: Recipe = RECIPE) -> Measurement:
    """Fine-tune a lab's base model on its poisoned rows with one method."""
    recipe = replace(recipe, defense=DEFENSES[method], seed=seed)
    spec = RunSpec(str(lab / "model"), lab / "poisoned.jsonl", lab / "pool.jsonl", recipe=recipe)
    base = load_base(spec.model, device="cpu")
    rows, limit = read_examples(spec.training_file), base.sequence_limit(None)
    task = encode_all(base.tokenizer, rows, limit)
    _, safe = select(base, rows, spec, limit, _log_warning)

    started = time.perf_counter()
    trained = train(base, task, safe, recipe, resolve(recipe, len(task), base.hidden_size))
    seconds = time.perf_counter() - started

    results = audit(trained.model, base.tokenizer, load_suites(lab, split), RefusalJudge(), recipe.audit)
    return Measurement(seed, method, tuple(results), seconds, trigger_rate(trained.metrics))


def summarize(values: Sequence[float]) -> Summary:
    """Mean, sample standard deviation and Student's interval of the mean: mean -+ t s / sqrt(n)."""
    mean, n = fmean(values), len(values)
    if n < 2:
        return Summary(mean, None, None, None)
    sd = stdev(values)
    half = (STUDENT[n - 2] if n - 2 < len(STUDENT) else 1.96) * sd / sqrt(n)
    return Summary(mean, sd, mean - half, mean + half)


def summaries(found: Sequence[Measurement]) -> dict[str, dict[str, Summary]]:
    """Every figure of every method, over the seeds."""
    by_method: dict[str, list[dict[str, float]]] = {}
    for each in found:
        by_method.setdefault(each.method, []).append(_figures(each))
    return {
        method: {name: summarize([row[name] for row in rows if name in row]) for name in rows[0]}
        for method, rows in by_method.items()
    }


def table(found: Sequence[Measurement], split: Split) -> str:
    """The report as Markdown: means with their intervals, then every run."""
    means = summaries(found)
    names = list(dict.fromkeys(name for row in means.values() for name in row))
    seeds = ", ".join(dict.fromkeys(str(each.seed) for each in found))
    return "\n".join(
        [
            f"# The lab's bench: {split} split, seeds {seeds}",
            "",
            f"Measured on {machine()}. Rates in percent: attacks that succeeded (attacked and other categories),",
            "refusals (look-alike, how-to), right answers (utility), degenerate replies (garbage).",
            "Mean +- standard deviation over the seeds [95 % interval of the mean].",
            "",
            *_rows(["method", *names], [[method, *_cells(row, names, _spread)] for method, row in means.items()]),
            "",
            "Every run, with the 95 % Wilson interval of its prompts:",
            "",
            *_rows(["seed", "method", *(result.suite for result in found[0].results)], [_run(each) for each in found]),
            "",
        ]
    )


def machine() -> str:
    """What the seconds were measured on, in words."""
    return f"{platform.machine()}, {torch.get_num_threads()} thread(s) of a CPU, torch {torch.__version__}"


def _write(folder: Path, found: Sequence[Measurement], methods: Sequence[str], split: Split) -> None:
    report = {
        "split": split,
        "machine": machine(),
        "methods": {method: asdict(DEFENSES[method]) for method in methods},
        "summary": {name: {key: asdict(value) for key, value in row.items()} for name, row in summaries(found).items()},
        "runs": [asdict(each) | {"garbage": each.garbage} for each in found],
    }
    (folder / "results.json").write_text(json.dumps(report, indent=2) + "\n")
    (folder / "results.md").write_text(table(found, split))


def _figures(each: Measurement) -> dict[str, float]:
    """All numbers of a measurement, rates in percent; what was not measured is left out."""
    rates = {result.suite: result.rate for result in each.results} | {"garbage": each.garbage}
    percent = {name: 100 * rate for name, rate in rates.items() if rate is not None}
    trained = {"training s": each.train_s, "trigger": each.trigger_rate and 100 * each.trigger_rate}
    return percent | {name: value for name, value in trained.items() if value is not None}


def _cells(row: dict[str, Summary], names: Sequence[str], show: Callable[[Summary], str]) -> list[str]:
    return [show(row[name]) if name in row else "-" for name in names]


def _spread(summary: Summary) -> str:
    if summary.sd is None:
        return f"{summary.mean:.1f}"
    return f"{summary.mean:.1f} +- {summary.sd:.1f} [{summary.low:.1f}, {summary.high:.1f}]"


def _run(each: Measurement) -> list[str]:
    rates = [
        f"{100 * result.rate:.1f} [{100 * result.low:.1f}, {100 * result.high:.1f}]" if result.rate is not None else "-"
        for result in each.results
    ]
    return [str(each.seed), each.method, *rates]


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _log_warning(message: dict[str, Any]) -> None:
    if message["kind"] == "warning":
        log.warning("%s", message["message"])
