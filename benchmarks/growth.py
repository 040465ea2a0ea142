"""Measure how CPU time grows with the pool, k, training rows, their length, and the number of jobs.

Run `python -m benchmarks.growth [--svg FILE]`. Each curve has five sizes, each twice the one before (jobs: ten times),
and the median CPU time of several rounds at each:

- pool: relevance and selection of 225 rows, dimension 384, from a pool of that many rows in memory;
- k: selection of k rows from 20,000, dimension 768, with known relevances;
- rows: one epoch of LoRA without a defense in batches of 16, on the random model of `benchmarks.training`;
- length: the same training on 32 rows with that many words each;
- jobs: the API's time to create a job in a project with that many jobs, measured by `benchmarks.api`.

The exponent is the least-squares slope of log time over log size: 1 for linear growth, 0 for constant time. The last
exponent is the slope between the two largest sizes, where fixed costs matter least.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import log
from pathlib import Path
from random import Random
from statistics import linear_regression, median

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from spard_lab.bench.plots import COLORS, STYLE, svg

from benchmarks import api, training
from spard.selection import dpp

Measure = Callable[[int], float]
"""Takes a size and returns the CPU seconds used."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The measurements of one curve: `runs[i]` are the CPU seconds of each round at `sizes[i]`."""

    name: str
    sizes: Sequence[int]
    runs: Sequence[Sequence[float]]

    @property
    def medians(self) -> list[float]:
        """Return the median CPU seconds at each size."""
        return [median(each) for each in self.runs]

    @property
    def exponent(self) -> float:
        """Return the growth exponent over all sizes."""
        return exponent(self.sizes, self.medians)

    @property
    def last(self) -> float:
        """Return the growth exponent between the two largest sizes."""
        return exponent(self.sizes[-2:], self.medians[-2:])


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the least-squares slope of log seconds over log sizes."""
    return linear_regression([log(each) for each in sizes], [log(each) for each in seconds]).slope


def main() -> None:
    """Measure the curves named by `--of`, print them, and with `--svg` draw them."""
    asked = _arguments()
    torch.set_num_threads(1)
    print(f"{platform.machine()}, {os.cpu_count()} cores, one thread, {asked.rounds} round(s), ", end="")
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory(prefix="spard-growth-") as folder:
        measures = _measures(Path(folder))
        curves = [_curve(name, *measures[name], asked.rounds) for name in asked.of]
    if asked.svg is not None:
        asked.svg.write_text(draw_plot(curves), encoding="utf-8")


def _measures(folder: Path) -> dict[str, tuple[Sequence[int], Measure]]:
    rows = training.write_rows(folder / "vocabulary.jsonl", 512, 0)
    model = training.write_model(folder / "model", rows, "5m", 0)

    def of_rows(count: int) -> float:
        return _training_cpu(model, training.write_rows(folder / "rows.jsonl", count, 0))

    def of_length(words: int) -> float:
        return _training_cpu(model, _of_words(folder / "length.jsonl", rows, 32, words))

    return {
        "pool": ((25_000, 50_000, 100_000, 200_000, 400_000), _pool),
        "k": ((50, 100, 200, 400, 800), _k),
        "rows": ((32, 64, 128, 256, 512), of_rows),
        "length": ((32, 64, 128, 256, 512), of_length),
        "jobs": ((10, 100, 1000, 10_000, 100_000), _new_job),
    }


def _curve(name: str, sizes: Sequence[int], measure: Measure, rounds: int) -> Curve:
    runs: list[list[float]] = [[] for _ in sizes]
    for _ in range(rounds):
        for size, found in zip(sizes, runs, strict=True):
            found.append(measure(size))
    curve = Curve(name, sizes, runs)
    print(f"\n{name}: exponent {curve.exponent:.2f}, last {curve.last:.2f}")
    for size, found in zip(sizes, runs, strict=True):
        print(f"{size:>9,}{median(found):>11.4f} CPU s ({min(found):.4f} to {max(found):.4f})", flush=True)
    return curve


def _pool(rows: int) -> float:
    pool_ND, task_MD = _draw_pool(rows, 384)
    begun = time.process_time()
    dpp.greedy(pool_ND, dpp.quality(pool_ND, task_MD), 225)
    return time.process_time() - begun


def _k(k: int) -> float:
    pool_ND, task_MD = _draw_pool(20_000, 768)
    q_N = dpp.quality(pool_ND, task_MD)
    begun = time.process_time()
    dpp.greedy(pool_ND, q_N, k)
    return time.process_time() - begun


def _draw_pool(rows: int, dimension: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a random pool and 100 task rows around one center, the case in which selection can skip no row."""
    torch.manual_seed(0)
    center_D = torch.randn(dimension)
    return center_D + torch.randn(rows, dimension), center_D + torch.randn(100, dimension)


def _of_words(path: Path, texts: Path, count: int, words: int) -> Path:
    """Write `count` chats of `words` random words each, a quarter of them in the request; return the path."""
    known = [word for line in texts.read_text().splitlines() for word in line.split() if word.isalpha()]
    rng = Random(0)
    parts = [(rng.choices(known, k=words // 4), rng.choices(known, k=words - words // 4)) for _ in range(count)]
    chats = [
        {
            "messages": [
                {"role": role, "content": " ".join(part)} for role, part in zip(("user", "assistant"), row, strict=True)
            ]
        }
        for row in parts
    ]
    path.write_text("\n".join(map(json.dumps, chats)) + "\n")
    return path


def _training_cpu(model: Path, rows: Path) -> float:
    return training.run_apart("ours", model, rows, 16, 1)["cpu_s"]


def _new_job(jobs: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return api.submit_s(Path(folder), jobs)


def draw_plot(curves: Sequence[Curve]) -> str:
    """Return a log-log plot as SVG: time against size, each as a multiple of the curve's smallest size."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.0, 4.2), layout="constrained")
        axis = figure.subplots()
        for curve, color, mark in zip(curves, COLORS, cycle("osD^v"), strict=False):
            x = [size / curve.sizes[0] for size in curve.sizes]
            y = [each / curve.medians[0] for each in curve.medians]
            axis.loglog(x, y, marker=mark, ms=4.5, lw=1.5, color=color, label=f"{curve.name}: {curve.exponent:.2f}")
        axis.set(xlabel="size, times the smallest", ylabel="CPU time, times that of the smallest")
        axis.legend(title="exponent")
        return svg(figure)


def _arguments() -> argparse.Namespace:
    names = ("pool", "k", "rows", "length", "jobs")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.growth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--of", nargs="+", choices=names, default=names, help="all, if left out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--svg", type=Path, help="draw it there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
