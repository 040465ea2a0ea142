"""Digests of weights: read once for a worker, told to its children, and never believed of a file that changed."""

from __future__ import annotations

import hashlib
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from spard.digests import file_sha256, folder_digest
from tests.worker.heard import Heard, Work
from tests.worker.parts import PLAIN, job_folder
from worker import inputs
from worker.inputs import file_digests
from worker.workdir import read_assignment, write_assignment


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were hashed."""
    found: list[Path] = []

    def digest_and_note(path: Path) -> str:
        found.append(path)
        return file_sha256(path)

    monkeypatch.setattr("worker.inputs.file_sha256", digest_and_note)
    inputs._cached_digest.cache_clear()
    return found


def pass_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns()
    monkeypatch.setattr("worker.inputs.time.time_ns", lambda: now + 60_000_000_000)


def test_files_are_hashed_again_only_when_they_were_written_to(
    read: list[Path], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    pass_a_minute(monkeypatch)
    first, again = file_digests(str(copy)), file_digests(str(copy))
    assert first == again == {path.name: file_sha256(path) for path in copy.iterdir() if path.name in first}
    assert sorted(path.name for path in read) == sorted(first)

    read.clear()
    weights_file = copy / "model.safetensors"
    changed = bytearray(weights_file.read_bytes())
    changed[-1] ^= 1
    weights_file.write_bytes(changed)
    assert file_digests(str(copy))["model.safetensors"] == hashlib.sha256(changed).hexdigest()
    assert [path.name for path in read] == ["model.safetensors"]


def test_the_digest_of_a_file_that_was_just_written_is_not_kept(read: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for content in (b"a", b"b"):
        file.write_bytes(content)
        assert file_digests(str(tmp_path)) == {file.name: hashlib.sha256(content).hexdigest()}
    assert len(read) == 2


def test_a_child_hashes_no_weights_that_it_is_told_of(
    work: Work, message_pipe: Heard, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = job_folder(tmp_path / "job", model, recipe=PLAIN, pool=None)
    write_assignment(folder, replace(read_assignment(folder), weights=file_digests(str(model))))
    hashed: list[Path] = []
    monkeypatch.setattr("worker.pipeline.file_sha256", hashed.append)
    work(folder)
    assert hashed == []
    assert folder_digest(model) in (folder.adapter / "manifest.json").read_text()
