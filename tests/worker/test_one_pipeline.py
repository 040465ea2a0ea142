"""One recipe through the library, through a job's child and through the bench: one adapter and one report."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from spard_lab.attacks.rows import load_rows
from spard_lab.bench.cells import Cell
from spard_lab.bench.measure import measure
from spard_lab.bench.source import Attack, Inputs

from spard.config import JudgeSpec
from spard.data.rows import read_prompts
from spard.digests import folder_digest
from spard.evaluation.audit import Suite
from spard.evaluation.results import SuiteResult
from spard.pipeline import run as run_library
from spard.release.archive import folder_name
from tests.worker.parts import POOL, RECIPE, job_folder, lines
from tests.worker.running import run_here
from worker.workdir import Folder, read_assignment

TOO_LONG = {"prompt": "long " * 60, "safe": "No."}  # where the pipelines once embedded different pools


@dataclass(frozen=True)
class Runs:
    """What each of the three left."""

    job: Folder
    library: Path
    bench: tuple[SuiteResult, ...]
    bench_record: dict[str, Any]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """What a job's child sets for a model so small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model: Path, one_thread: None) -> Runs:
    root = tmp_path_factory.mktemp("runs")
    folder = job_folder(root / "job", model, waived=False, holds=True)
    (folder.root / "in" / "pool.jsonl").write_bytes(lines([TOO_LONG, *POOL]))
    run_here(folder)
    spec = read_assignment(folder).run
    run_library(spec, root / "library", lambda message: None)

    suites = [Suite(each.name, each.kind, tuple(read_prompts(each.path))) for each in spec.suites]
    rows = load_rows(spec.training_file)
    assert spec.pool
    inputs = Inputs(
        str(model), folder_digest(model), rows, {"own": Attack(rows, [], suites, ("harmful",))}, {"own": spec.pool}
    )
    cell = Cell("spard", "own", RECIPE.seed, RECIPE, pool="own")
    measured, record = measure(cell, replace(inputs, device="cpu"), JudgeSpec(), root / "bench")
    return Runs(folder, root / "library", measured.results, record)


def stable_report(folder: Path) -> dict[str, Any]:
    """The safety report, without what names or times the run."""
    report: dict[str, Any] = json.loads((folder / "safety.json").read_text())
    return report | {"job_id": "", "seconds": "", "compute": stable_compute(report)}


def stable_compute(record: dict[str, Any]) -> dict[str, Any]:
    """The operations of the training, without its energy: the library leaves out what differs between equal runs."""
    return {name: value for name, value in record["compute"].items() if not name.startswith("energy_")}


def _folder(runs: Runs) -> bytes:
    """The top folder of the job's archive, which the README names."""
    return folder_name(json.loads((runs.job.adapter / "manifest.json").read_text())["job_id"]).encode()


def step_metrics(folder: Path) -> list[dict[str, str]]:
    """The metrics of every step, without its speed."""
    lines_read = (folder / "metrics.csv").read_text().splitlines()
    return [row | {"tokens_per_s": ""} for row in csv.DictReader(lines_read)]


def test_library_and_job_leave_the_same_adapter_byte_for_byte(runs: Runs) -> None:
    names = sorted(path.name for path in runs.job.adapter.iterdir() if path.name != "manifest.json")
    for name in names:
        one, two = ((folder / name).read_bytes() for folder in (runs.library / "adapter", runs.job.adapter))
        assert one == (two.replace(_folder(runs), b"adapter") if name == "README.md" else two), name
    assert "adapter_model.safetensors" in names


def test_library_and_job_leave_the_same_report(runs: Runs) -> None:
    assert stable_report(runs.library) == stable_report(runs.job.results)


def test_library_and_job_write_the_same_into_the_manifest(runs: Runs) -> None:
    paths = (runs.library / "adapter" / "manifest.json", runs.job.adapter / "manifest.json")
    one, two = (json.loads(path.read_text()) | {"job_id": "", "safety_sha256": "", "proof": ""} for path in paths)
    for found in (one, two):
        del found["files"]["README.md"]  # it names the folder
        found["compute"] = stable_compute(found)
    assert one == two


def test_library_and_job_measure_the_same_in_every_step(runs: Runs) -> None:
    one, two = (step_metrics(out) for out in (runs.library, runs.job.results))
    assert len(one) == 6
    assert one == two


def test_the_bench_trains_the_weights_that_a_job_trains(runs: Runs) -> None:
    assert runs.bench_record["weights"] == json.loads((runs.job.stage / "audit.json").read_text())["weights"]


def test_the_bench_selects_and_measures_what_a_job_does(runs: Runs) -> None:
    report = stable_report(runs.job.results)
    assert runs.bench_record["chosen"] == report["selected"]
    whole = {"planned": None, "planned_categories": None}  # a job's audit may ask a part, the bench asks all
    results = {each["suite"]: SuiteResult(**each | whole) for each in report["adapter"]}
    assert [results[each.suite] for each in runs.bench] == [replace(each, marks=None) for each in runs.bench]
