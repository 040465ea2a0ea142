"""A GPU with too little memory, and one that breaks: what is tried again, and who takes no more jobs."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.llama.modeling_llama import LlamaModel

from app.db.tables import JobStatus
from app.settings import Settings
from spard.config import ResolvedNumbers, resolve
from spard.config.run_spec import RunSpec
from spard.data.batches import cut
from spard.errors import OutOfGpuMemory
from spard.models import budget
from spard.models.base import load_base
from spard.models.memory import Gpus, TrainedPart, compute_need
from spard.models.shapes import read_shape
from spard.pipeline import train
from spard.pipeline.context import Context, OutputsInFolder, OutputsInMemory
from spard.pipeline.messages import Reporter
from spard.pipeline.train import apply_plan, fitting, halving, last_micro_batch
from spard.selection import embeddings
from tests.narrowing import require
from tests.spard.parts import away
from tests.worker.parts import PLAIN, job_folder
from tests.worker.shop import Shop, at_work, forget_waits, scripted_command, wait_until
from worker import gpu_probe, pipeline
from worker.failures import outer_failure
from worker.fitness import Fitness
from worker.metrics import WorkerMetrics
from worker.protocol import Report
from worker.workdir import Folder, read_assignment
from worker.worker import Worker

HALVED = {"micro_batch_size": 2}


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A GPU that holds so many rows of a batch that is trained on, and no more."""
    forward: Any = LlamaModel.forward

    def limit(rows: int) -> None:
        def forward_limited(self: LlamaModel, input_ids: torch.Tensor, **more: Any) -> Any:
            if torch.is_grad_enabled() and len(input_ids) > rows:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return forward(self, input_ids=input_ids, **more)

        monkeypatch.setattr(LlamaModel, "forward", forward_limited)

    return limit


def run(folder: Folder) -> list[str]:
    """The lines of what a run in this process reports."""
    with tempfile.TemporaryFile() as sink:
        pipeline.run(folder, Report(sink.fileno()), lambda: False)
        sink.seek(0)
        return sink.read().decode().splitlines()


def weights(folder: Folder) -> dict[str, torch.Tensor]:
    return load_file(folder.adapter / "adapter_model.safetensors")


def test_too_little_memory_is_worth_one_attempt_with_half_the_piece(
    little_memory: Callable[[int], None], tmp_path: Path, model: Path
) -> None:
    little_memory(2)
    folder = job_folder(tmp_path / "job", model, recipe=PLAIN, pool=None)
    with pytest.raises(OutOfGpuMemory, match="2 rows at a time"):
        run(folder)
    run(folder)
    assert json.loads(folder.safety.read_text())["gate"]["decision"] == "waived"


def test_the_smaller_piece_changes_the_adapter_by_rounding_only(
    little_memory: Callable[[int], None], tmp_path: Path, model: Path
) -> None:
    whole, cut = (job_folder(tmp_path / name, model, recipe=PLAIN, pool=None) for name in ("whole", "cut"))
    (cut.stage / "pieces.json").write_text(json.dumps(HALVED))
    run(whole)
    little_memory(2)
    run(cut)
    expected, found = weights(whole), weights(cut)
    assert away([found[name] for name in expected], expected.values()) < 1e-3


def test_the_smaller_piece_is_told_in_the_adapter_s_manifest(tmp_path: Path, model: Path) -> None:
    folder = job_folder(tmp_path / "job", model, recipe=PLAIN, pool=None)
    (folder.stage / "pieces.json").write_text(json.dumps(HALVED))
    run(folder)
    assert json.loads((folder.adapter / "manifest.json").read_text())["micro_batch_size"] == 2


def test_pieces_are_halved_down_to_one_row(little_memory: Callable[[int], None], tmp_path: Path, model: Path) -> None:
    little_memory(1)
    folder = job_folder(tmp_path / "job", model, recipe=PLAIN, pool=None)
    for rows in (2, 1):
        with pytest.raises(OutOfGpuMemory, match=f"{rows} rows at a time"):
            run(folder)
    run(folder)
    assert json.loads(folder.safety.read_text())["micro_batch_size"] == 1


def test_a_pass_gets_fewer_tokens_as_the_piece_gets_fewer_rows(tmp_path: Path, model: Path) -> None:
    folder = job_folder(tmp_path / "job", model, recipe=replace(PLAIN, pass_tokens=1000), pool=None)
    (folder.stage / "pieces.json").write_text(json.dumps(HALVED))
    (folder.stage / "pieces-1.json").write_text(json.dumps({"micro_batch_size": 1}))
    run_of = read_assignment(folder).run
    context = Context(run_of, load_base(run_of.model), Reporter(lambda message: None), OutputsInFolder(folder.stage))
    recipe = fitting(context, run_of.recipe, resolve(run_of.recipe, 8, 64))
    assert (recipe.micro_batch_size, recipe.pass_tokens) == (1, 250)


def test_a_job_takes_no_more_tokens_at_once_than_its_provider_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    asked = list[int]()

    def cut_and_note(lengths: Sequence[int], most: int, beside: int) -> list[list[int]]:
        asked.append(most)
        return cut(lengths, most, beside)

    monkeypatch.setattr(embeddings, "cut", cut_and_note)
    folder = job_folder(tmp_path / "job", model)
    folder.job.write_text(json.dumps(json.loads(folder.job.read_text()) | {"pass_tokens": 96}))

    run(folder)

    assert set(asked) == {96}
    assert apply_plan(PLAIN, None).pass_tokens == 96
    budget.set_tokens(None)


def test_a_gpu_s_plan_cuts_the_training_and_stands_in_the_manifest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    shape = require(read_shape(str(model)))
    least = compute_need(shape, TrainedPart(PLAIN.lora), 64)
    monkeypatch.setattr(train, "run_gpus", lambda context: Gpus(least.alone))
    folder = job_folder(tmp_path / "job", model, recipe=PLAIN, pool=None)
    told = run(folder)
    manifest = json.loads((folder.adapter / "manifest.json").read_text())
    plan = manifest["memory_plan"]
    assert (plan["fits"], plan["gradient_checkpointing"], plan["ranks"]) == (True, True, 1)
    assert plan["peak_bytes"] <= plan["memory_bytes"] == least.alone
    assert manifest["micro_batch_size"] == plan["micro_batch_size"] < 4
    assert any("padded tokens at most, activation checkpointing" in line for line in told)
    whole = job_folder(tmp_path / "whole", model, recipe=PLAIN, pool=None)
    monkeypatch.setattr(train, "run_gpus", lambda context: None)
    run(whole)
    assert "memory_plan" not in json.loads((whole.adapter / "manifest.json").read_text())
    expected, found = weights(whole), weights(folder)
    assert away([found[name] for name in expected], expected.values()) < 1e-3


def test_halving_goes_on_below_a_smaller_plan(tmp_path: Path, model: Path) -> None:
    outputs, base = OutputsInMemory(), load_base(model)
    run_of = RunSpec(str(model), tmp_path, recipe=PLAIN)
    context = Context(run_of, base, Reporter(lambda message: None), outputs)
    numbers = ResolvedNumbers(1, 16, 1.0, 1e-3)
    found = []
    for most in (None, 3):
        with pytest.raises(OutOfGpuMemory), halving(context, replace(PLAIN, micro_batch_size=most), numbers):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        found.append(last_micro_batch(context))
    assert found == [8, 1]


def test_a_piece_of_one_row_is_not_halved(little_memory: Callable[[int], None], tmp_path: Path, model: Path) -> None:
    little_memory(0)
    recipe = replace(PLAIN, micro_batch_size=1)
    with pytest.raises(torch.OutOfMemoryError):
        run(job_folder(tmp_path / "job", model, recipe=recipe, pool=None))


def test_what_the_first_attempt_found_too_large_the_second_one_knows(light_shop: Shop) -> None:
    job = light_shop.do("gpu_oom")
    assert (job.status, job.attempt) == (JobStatus.succeeded, 2)
    assert any("the next attempt takes 2 rows at a time" in event for event in light_shop.events(job.id))


def test_a_worker_takes_no_job_while_its_gpu_is_broken(light_shop: Shop) -> None:
    mended = light_shop.folder / "mended"
    probe = [sys.executable, "-c", f"import pathlib, sys; sys.exit(not pathlib.Path({str(mended)!r}).exists())"]
    worker = Worker(light_shop.settings(gpu_probe_s=0.1), scripted_command("gpu_error"), probe)
    jobs = [light_shop.add_job() for _ in range(2)]
    with at_work(worker):
        wait_until(lambda: light_shop.job(jobs[0]).status == JobStatus.queued and light_shop.job(jobs[0]).waits == 1)
        wait_until(lambda: not worker.is_fit)
        waiting = [light_shop.job(job_id).status for job_id in jobs]
        mended.touch()
        forget_waits(light_shop)
        ended = [light_shop.until_ended(job_id) for job_id in jobs]
    assert waiting == [JobStatus.queued] * 2
    # The second one met a GPU that worked again: what it says is its own.
    assert [(job.status, job.attempt) for job in ended] == [(JobStatus.succeeded, 1), (JobStatus.succeeded, 2)]


def test_a_broken_gpu_leaves_the_job_to_another_worker(light_shop: Shop) -> None:
    broken = Worker(light_shop.settings(gpu_probe_s=60.0), scripted_command("gpu_error"), ["/bin/false"])
    job_id = light_shop.add_job()
    with at_work(broken):
        wait_until(lambda: not broken.is_fit)
        forget_waits(light_shop)
        with light_shop.serving("good"):
            job = light_shop.until_ended(job_id)
    assert (job.status, job.attempt) == (JobStatus.succeeded, 1)
    assert any("the GPU stopped working" in event for event in light_shop.events(job_id))


def test_each_gpu_that_a_job_has_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    made, ones = list[str](), torch.ones

    def ones_and_note(*size: int, device: str) -> torch.Tensor:
        made.append(device)
        return ones(*size)

    monkeypatch.setattr(torch, "ones", ones_and_note)
    monkeypatch.setenv("SPARD_GPUS_PER_JOB", "2")
    gpu_probe.main()
    assert made == ["cuda:0", "cuda:1"]
    second_is_broken = [sys.executable, "-c", "import os; assert os.environ['SPARD_GPUS_PER_JOB'] == '1'"]
    for gpus, is_broken in ((1, False), (2, True)):
        fitness = Fitness(Settings(gpus_per_job=gpus), WorkerMetrics(), os.environ, second_is_broken)
        assert fitness.is_at_fault(outer_failure("gpu_error")) == is_broken


def test_a_gpu_error_on_a_gpu_that_works_costs_the_job_an_attempt(light_shop: Shop) -> None:
    worker = Worker(light_shop.settings(gpu_probe_s=0.1), scripted_command("gpu_error"), ["/bin/true"])
    job_id = light_shop.add_job()
    with at_work(worker):
        job = light_shop.until_ended(job_id)
    assert (job.status, job.attempt, job.waits) == (JobStatus.succeeded, 2, 0)
