"""A job that goes on from the adapter of another."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from spard.config import Lora
from spard.errors import AdapterMismatch
from spard.release.archive import unpack
from tests.worker.parts import RECIPE, job_folder
from worker import pipeline
from worker.protocol import Report
from worker.results import seal
from worker.workdir import Folder


def run(folder: Folder) -> None:
    told = os.open(folder.root.parent / "messages", os.O_CREAT | os.O_WRONLY)
    try:
        pipeline.run(folder, Report(told), lambda: False)
    finally:
        os.close(told)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Folder:
    folder = job_folder(tmp_path_factory.mktemp("first") / "job", model)
    run(folder)
    seal(folder, Ed25519PrivateKey.generate(), "ftjob-1")
    return folder


def reports(folder: Folder) -> tuple[dict[str, object], dict[str, object]]:
    return json.loads(folder.safety.read_text()), json.loads((folder.adapter / "manifest.json").read_text())


def test_the_next_job_learns_further_and_is_held_against_the_base_model(
    first: Folder, model: Path, tmp_path: Path
) -> None:
    folder = job_folder(tmp_path / "job", model, start_from=Path("in/start"))
    unpack(first.archive, folder.start)

    run(folder)

    (before, one), (after, two) = reports(first), reports(folder)
    assert after["base"] == before["base"]
    assert two["base_digest"] == one["base_digest"]
    assert two["tau"] == one["tau"]
    assert two["tensor_digest"] != one["tensor_digest"]


def test_an_adapter_of_another_shape_ends_the_job(first: Folder, model: Path, tmp_path: Path) -> None:
    other = replace(RECIPE, lora=replace(RECIPE.lora or Lora(), rank=7))
    folder = job_folder(tmp_path / "job", model, recipe=other, start_from=Path("in/start"))
    unpack(first.archive, folder.start)

    with pytest.raises(AdapterMismatch):
        run(folder)
