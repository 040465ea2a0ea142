"""Every kind of base folder that people have is taken or refused in one sentence, and the page of them says which."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spard.commands import check_model
from spard.models.folder.check import findings
from spard.training import trial
from tests.spard.base_folders import KINDS, PAGE, Kind, by_trial, finding_notes, table_row, write_kind

TAKEN = [kind for kind in KINDS if not kind.refusal]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "RENDERING_S", 1.0)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_folder_is_taken_or_refused_in_one_sentence_that_the_page_has(kind: Kind, tmp_path: Path) -> None:
    folder = write_kind(kind, tmp_path)
    refused = by_trial(folder)
    assert bool(refused) == bool(kind.refusal), refused
    assert kind.refusal in refused
    assert "\n" not in refused
    assert str(tmp_path) not in refused
    if not refused:
        assert kind.note in finding_notes(folder)
        assert bool(kind.note) == bool(finding_notes(folder))
    assert table_row(kind, folder, refused) in PAGE.read_text()


def test_the_page_has_no_other_rows() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert len(rows) == len(KINDS) + 1 >= 31


def test_no_file_is_read_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, plain = list[int](), Path.read_text

    def noting(path: Path, *given: object, **more: object) -> str:
        read.append(os.stat(path).st_size)
        return plain(path, *given, **more)  # type: ignore[arg-type]  # as they came

    for kind in (each for each in KINDS if "200 MB" in each.name):
        folder = write_kind(kind, tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", noting)
            (found,) = findings(folder)
        assert found.code == "file_too_large"
    assert max(read, default=0) < 1 << 20


def test_the_command_says_what_the_provider_should_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind = next(each for each in KINDS if each.note and "penalties" in each.name)
    assert check_model.main([str(write_kind(kind, tmp_path))]) == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert kind.note in note


def test_a_folder_that_is_there_is_not_called_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind = next(each for each in KINDS if each.name == "GPTQ")
    assert check_model.main([str(write_kind(kind, tmp_path))]) == 1
    assert capsys.readouterr().err.startswith("invalid_model: ")
    assert check_model.main([str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith("model_not_found: ")
