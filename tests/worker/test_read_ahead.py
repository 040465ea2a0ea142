"""A child reads the base model before it has a job: the second job reads no weights, and no base model serves twice."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs

from app.db.tables import JobStatus
from app.settings import Settings
from spard.digests import file_sha256
from spard.errors import InvalidModel
from spard.models.base import Base, load_base, read_base
from tests.worker.heard import Heard
from tests.worker.parts import PLAIN, job_folder
from tests.worker.shop import WAIT_S, Shop, at_work
from worker import pipeline, preloaded_model
from worker.inputs import file_digests
from worker.preloaded_model import Holder, may_keep, may_read
from worker.process import Child, environment
from worker.protocol import Message, ModelRequest, Report, prefetch_key
from worker.sandbox import AllowedPaths, ChildSandbox
from worker.workdir import Assignment, Folder, read_assignment, write_assignment
from worker.worker import Worker

GIB = 1 << 30
FULL = replace(PLAIN, lora=None)
# A child that says when it holds a base model.
SAYS = """
import json, os, sys
from worker import child, preloaded_model
told, hold = os.dup(1), preloaded_model.Holder.hold
def hold_and_say(self, wanted):
    hold(self, wanted)
    os.write(told, json.dumps({"kind": "held", "held": not self.is_empty}).encode() + b"\\n")
preloaded_model.Holder.hold = hold_and_say
child.main()
"""


class Enough(Exception):
    """The first step was made."""


class UntilFirstStep(Report):
    """A report that ends the job with its first step."""

    def metrics(self, *told: object, **more: object) -> None:
        raise Enough


def known_assignment(folder: Folder, model: Path) -> Assignment:
    """The folder's job, told the digests of the model's files as a worker tells them."""
    assignment = replace(read_assignment(folder), weights=file_digests(str(model)))
    write_assignment(folder, assignment)
    return read_assignment(folder)


def wanted_model(folder: Folder, model: Path) -> ModelRequest:
    found = prefetch_key(known_assignment(folder, model))
    assert found is not None
    return found


@contextmanager
def without_weights(model: Path) -> Iterator[None]:
    """Take the weights away inside the block: who reads them fails."""
    aside = model.parent / f"{model.name}.aside"
    (model / "model.safetensors").rename(aside)
    try:
        yield
    finally:
        aside.rename(model / "model.safetensors")


def last_word(child: Child) -> Message:
    """What a child says last; it ends by itself."""
    said = list[Message]()
    while not child.is_over:
        message = child.receive(WAIT_S)
        said += [message] if message else []
    return said[-1]


@pytest.fixture
def own_model(model: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may change."""
    return shutil.copytree(model, tmp_path / "own")


def test_a_job_whose_base_model_was_read_ahead_reads_no_weights_until_its_first_step(
    own_model: Path, tmp_path: Path, message_pipe: Heard
) -> None:
    folder, holder, report = job_folder(tmp_path / "job", own_model), Holder(), UntilFirstStep(message_pipe.fd)
    holder.hold(wanted_model(folder, own_model))
    with without_weights(own_model):
        with pytest.raises(Enough):
            pipeline.run(folder, report, lambda: False, holder=holder)
        with pytest.raises(InvalidModel):  # it is given away once
            pipeline.run(folder, report, lambda: False, holder=holder)


def test_it_is_the_base_model_that_would_be_loaded(model: Path, tmp_path: Path) -> None:
    asked, holder = wanted_model(job_folder(tmp_path / "job", model), model), Holder()
    holder.hold(asked)
    read, loaded = holder.take(asked), load_base(model)
    assert read is not None
    assert (read.digest, read.device, read.origin) == (loaded.digest, loaded.device, loaded.origin)
    assert {name: part.tolist() for name, part in read.model.state_dict().items()} == {
        name: part.tolist() for name, part in loaded.model.state_dict().items()
    }
    assert not read.model.training
    assert holder.is_empty


@pytest.mark.parametrize(
    "other",
    [{"model": "elsewhere"}, {"quantization": "nf4"}, {"revision": "main"}, {"weights": {"config.json": "changed"}}],
)
def test_another_base_model_is_not_given_in_its_place_and_the_memory_is_released(
    model: Path, tmp_path: Path, other: dict[str, object]
) -> None:
    asked, holder = wanted_model(job_folder(tmp_path / "job", model), model), Holder()
    holder.hold(asked)
    assert holder.take(replace(asked, **other)) is None  # type: ignore[arg-type]
    assert holder.is_empty
    assert holder.take(asked) is None


def test_only_while_memory_is_left(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, holder, found = wanted_model(job_folder(tmp_path / "job", model), model), Holder(), list[bool]()
    for free_mb, does in ((1023, "hold"), (2000, "hold"), (1025, "look"), (1023, "look")):
        monkeypatch.setattr(preloaded_model, "available_mb", lambda free=free_mb: free)
        if does == "hold":
            holder.hold(asked)
        else:
            holder.look()
        found.append(holder.is_empty)
    assert found == [True, False, False, True]


def test_the_job_that_works_may_need_as_much_again() -> None:
    assert (may_read(15 * GIB, 30 * GIB), may_read(15 * GIB, 30 * GIB - 1)) == (True, False)
    assert (may_keep(15 * GIB, 15 * GIB), may_keep(15 * GIB, 15 * GIB - 1)) == (True, False)
    assert (may_keep(1, GIB), may_keep(1, GIB - 1)) == (True, False)


def test_nothing_is_read_onto_a_gpu_that_another_job_has(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, holder, read = wanted_model(job_folder(tmp_path / "job", model), model), Holder(), list[str]()

    def read_and_note(source: str, *args: object, quantization: str, **more: object) -> Base:
        read.append(quantization)
        return read_base(source)

    monkeypatch.setattr(preloaded_model, "read_base", read_and_note)
    for has_gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        holder.hold(replace(asked, quantization="nf4"))
    assert read == ["nf4"]


def test_a_base_model_that_cannot_be_read_is_the_next_job_s_to_tell_of(own_model: Path, tmp_path: Path) -> None:
    asked, holder = wanted_model(job_folder(tmp_path / "job", own_model), own_model), Holder()
    (own_model / "tokenizer.json").write_text("{")
    holder.hold(asked)
    assert holder.is_empty


def test_what_ranks_load_is_not_read_ahead(model: Path, tmp_path: Path) -> None:
    assignment = known_assignment(job_folder(tmp_path / "job", model), model)
    assert prefetch_key(replace(assignment, processes=2)) is None
    assert prefetch_key(replace(assignment, weights={})) is None


def test_full_fine_tuning_leaves_nothing_behind_in_what_was_read_ahead(own_model: Path, tmp_path: Path) -> None:
    """Its weights are mapped from the file, and every step writes into them; the next child has those of the file."""
    before = file_sha256(own_model / "model.safetensors")
    settings, left = Settings(data_dir=tmp_path / "data"), []
    for number in (1, 2):
        folder = job_folder(tmp_path / f"job-{number}", own_model, recipe=FULL, waived=True)
        child = Child([sys.executable, "-P", "-c", SAYS], environment(settings), ChildSandbox.from_settings(settings))
        try:
            child.read_ahead(wanted_model(folder, own_model))
            if child._cell.sandbox.kind != "landlock":
                assert child.receive(WAIT_S) == {"kind": "held", "held": True}
            child.work(folder)
            child.begin(Folder(tmp_path / "another"), AllowedPaths())  # nobody reads this line
            last = last_word(child)
        finally:
            child.kill()
        assert last["kind"] == "done", last
        assert child.exit_code == 0
        left.append(load_file(folder.adapter / "model.safetensors"))
    assert file_sha256(own_model / "model.safetensors") == before
    first, second = left
    assert all(first[name].equal(second[name]) for name in first)


def test_the_second_job_of_a_worker_finds_the_base_model_read(light_shop: Shop) -> None:
    jobs = [light_shop.add_job(waived=True, recipe=asdict(PLAIN)) for _ in range(2)]
    with capture_logs() as logged, at_work(Worker(light_shop.settings(warm_child=True))):
        ended = [light_shop.until_ended(job_id) for job_id in jobs]
    assert [job.status for job in ended] == [JobStatus.succeeded] * 2
    lines = [entry for entry in logged if entry["event"] == "child"]
    found = [entry["job_id"] for entry in lines if "the base model was read ahead" in entry["line"]]
    assert found == ([] if ChildSandbox.from_settings(light_shop.settings()).sandbox.kind == "landlock" else [jobs[1]])
    assert len({entry["child"] for entry in lines if "training " in entry["line"]}) == 2
