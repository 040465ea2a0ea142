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
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from spard.audit import SuiteResult, audit
from spard.config import Defense, NoDefense, Recipe, Spard, resolve
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

DEFENSES: dict[str, Defense] = {
    "none": NoDefense(),
    "spard": Spard(),
    "closed_form": Spard(variant="closed_form"),
    "reference": Spard(variant="reference"),
}
BASE = "base"
SUITES = ("attacked", "other", "look-alike", "how-to", "utility")

# Quantile 0.975 of Student's distribution for 1, 2, ... degrees of freedom; 1.96 beyond.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One model of one seed on every suite; a base model was not trained."""

    seed: int
    method: str
    results: dict[str, SuiteResult]
    garbage: float  # share of degenerate replies to harmful and benign prompts: a ruined model is not a safe one
    train_s: float | None = None
    trigger_rate: float | None = None

    def rate(self, suite: str) -> float | None:
        return self.results[suite].rate


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean of one figure over the seeds, its standard deviation, and the mean's 95 % interval."""

    mean: float
    sd: float | None
    low: float | None
    high: float | None
    n: int


def bench(folder: Path, seeds: Sequence[int], methods: Sequence[str], split: Split) -> list[Measurement]:
    """Make each seed's lab in `folder`, run every method on its poisoned rows, write results.json and results.md."""
    found = []
    for seed in seeds:
        lab = folder / f"seed-{seed}"
        make(lab, seed)
        found.append(measure_base(lab, seed, split))
        for method in methods:
            found.append(measure(lab, seed, method, split))
            log.info("seed %d, %s: %s", seed, method, {name: found[-1].rate(name) for name in SUITES})
    (folder / "results.json").write_text(json.dumps(_report(found, split), indent=2) + "\n")
    (folder / "results.md").write_text(table(found, split))
    return found


def measure_base(lab: Path, seed: int, split: Split) -> Measurement:
    """The base model of a lab, before anybody attacked it."""
    base = load_base(lab / "model", device="cpu")
    return _measured(seed, BASE, audit(base.model, base.tokenizer, load_suites(lab, split), RefusalJudge(), AUDIT))


def measure(lab: Path, seed: int, method: str, split: Split) -> Measurement:
    """Fine-tune a lab's base model on its poisoned rows with one method, at the default recipe."""
    recipe = Recipe(defense=DEFENSES[method], seed=seed)
    spec = RunSpec(str(lab / "model"), lab / "poisoned.jsonl", lab / "pool.jsonl", recipe=recipe)
    base = load_base(spec.model, device="cpu")
    rows, limit = read_examples(spec.training_file), base.sequence_limit(None)
    task = encode_all(base.tokenizer, rows, limit)
    _, safe = select(base, rows, spec, limit, _quietly)
    started = time.perf_counter()
    trained = train(base, task, safe, recipe, resolve(recipe, len(task), base.hidden_size))
    seconds = time.perf_counter() - started
    results = audit(trained.model, base.tokenizer, load_suites(lab, split), RefusalJudge(), recipe.audit)
    return _measured(seed, method, results, seconds, trigger_rate(trained.metrics))


def summarize(values: Sequence[float]) -> Summary:
    """Mean, sample standard deviation and Student interval: mean -+ t s / sqrt(n)."""
    mean, n = fmean(values), len(values)
    if n < 2:
        return Summary(mean, None, None, None, n)
    sd = stdev(values)
    half = (STUDENT[n - 2] if n - 2 < len(STUDENT) else 1.96) * sd / sqrt(n)
    return Summary(mean, sd, mean - half, mean + half, n)


def table(found: Sequence[Measurement], split: Split) -> str:
    """The report as Markdown: means with intervals, then every run."""
    seeds = sorted({each.seed for each in found})
    head = [*(_TITLES[name] for name in SUITES), "garbage", "training s", "trigger rate"]
    lines = [
        f"# The lab's bench: {split} split, seeds {', '.join(map(str, seeds))}",
        "",
        f"{machine()}. Mean over the seeds [95 % interval of the mean]; rates in percent.",
        "",
        *_header(["method", *head]),
        *(_row([method, *_means(rows)]) for method, rows in _by_method(found).items()),
        "",
        "Every run [95 % Wilson interval of its prompts]:",
        "",
        *_header(["seed", "method", *head]),
        *(_row([str(each.seed), each.method, *_figures(each)]) for each in found),
        "",
    ]
    return "\n".join(lines)


def machine() -> str:
    """What the seconds were measured on, in words."""
    threads = torch.get_num_threads()
    return f"{platform.machine()}, {threads} CPU thread{'s' * (threads > 1)}, torch {torch.__version__}"
