"""Files of a base model that change under a running engine, or between an offer and a job, answer and train nothing."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from app.inference.protocol import refusal_error
from spard.digests import folder_digest
from spard.models.base import load_base
from tests.worker.engine_in_process import QUESTIONS, line
from tests.worker.shop import Shop
from worker.engine.serve import Engine, WatchedFolder
from worker.failures import BaseModelChanged, failure
from worker.inputs import fill
from worker.workdir import new_folder


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copied"))


def overwrite(folder: Path) -> None:
    """Write over weights in place, as `cp` and `rsync --inplace` do."""
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\x07" * 4096)


def test_a_file_that_was_touched_or_copied_changes_nothing(copy: Path) -> None:
    clock = Clock()
    digest, watched = folder_digest(copy), WatchedFolder(copy, clock)
    clock.now += 2
    os.utime(copy / "config.json")
    assert not watched.has_changed(digest)
    clock.now += 2
    weights = copy / "model.safetensors"
    shutil.copy(weights, copy / "again")
    (copy / "again").rename(weights)
    assert not watched.has_changed(digest)


@pytest.mark.parametrize("how", [overwrite, lambda folder: (folder / "config.json").unlink()])
def test_a_file_that_has_other_bytes_or_is_gone_is_noticed(how: object, copy: Path) -> None:
    clock = Clock()
    digest, watched = folder_digest(copy), WatchedFolder(copy, clock)
    how(copy)  # type: ignore[operator]  # one of the two above
    assert not watched.has_changed(digest)  # it was looked at in this second
    clock.now += 2
    assert watched.has_changed(digest)


def test_an_engine_ends_with_all_its_requests_when_its_base_model_is_overwritten(copy: Path) -> None:
    clock, said = Clock(), list[dict[str, object]]()
    watched = WatchedFolder(copy, clock)
    engine = Engine(load_base(copy, device="cpu"), said.append, 1, 1 << 20, None, watched)  # type: ignore[arg-type]
    for number in (1, 2):
        engine.take(line(number, QUESTIONS[number], None))
    engine.step()
    overwrite(copy)
    clock.now += 2
    engine.step()
    told = [each for each in said if each["kind"] == "failed"]
    assert [(each["id"], each["code"]) for each in told] == [(1, "base_model_changed"), (2, "base_model_changed")]
    assert "spard models add" in refusal_error(told[0]).message  # type: ignore[arg-type]
    assert (engine.is_busy, engine._has_ended) == (False, True)


def test_a_job_does_not_begin_on_other_files_than_were_offered(light_shop: Shop, copy: Path) -> None:
    job = light_shop.job(light_shop.add_job())
    job.spec = replace(job.spec, model=replace(job.spec.model, source=str(copy), digest=folder_digest(copy)))
    with new_folder(light_shop.folder, "job-a1") as folder:
        fill(folder, job, light_shop.storage, light_shop.settings(), lambda: None)
    overwrite(copy)
    with new_folder(light_shop.folder, "job-a2") as folder, pytest.raises(BaseModelChanged) as error:
        fill(folder, job, light_shop.storage, light_shop.settings(), lambda: None)
    assert "spard models add" in error.value.message
    told = failure(error.value)
    assert (told.code, told.retryable, str(copy) in told.message) == ("base_model_changed", False, False)
