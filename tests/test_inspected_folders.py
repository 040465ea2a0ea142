"""Only stubs are remembered, and each by its own bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.catalog import fitness
from app.files import template_look
from app.files.template_look import FolderLook
from tests.inspected_folders import Memory, remembered_stubs


class Inspection:
    """Counts the folders that are inspected."""

    def __init__(self) -> None:
        self.folders = list[Path]()

    def __call__(self, folder: Path) -> FolderLook:
        self.folders.append(folder)
        return FolderLook([], None)


@pytest.fixture
def inspection() -> Inspection:
    return Inspection()


def make_folder(folder: Path, config: str = "{}", **files: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(text)
    return folder


def test_the_same_stub_is_inspected_once(inspection: Inspection, tmp_path: Path) -> None:
    memory, folders = Memory(inspection), [make_folder(tmp_path / name / "model") for name in "ab"]
    assert memory.inspect(folders[0]) is memory.inspect(folders[1])
    assert inspection.folders == folders[:1]


@pytest.mark.parametrize(
    ("name", "files"),
    [("other", {}), ("model", {"config": '{"model_type": "llama"}'}), ("model", {"config": " " * 5000})],
)
def test_another_folder_is_inspected(inspection: Inspection, tmp_path: Path, name: str, files: dict[str, str]) -> None:
    memory, other = Memory(inspection), make_folder(tmp_path / "b" / name, **files)
    memory.inspect(make_folder(tmp_path / "a" / "model"))
    memory.inspect(other)
    assert inspection.folders[1:] == [other]


def test_a_folder_with_a_tokenizer_is_inspected_each_time(inspection: Inspection, tmp_path: Path) -> None:
    memory, folder = Memory(inspection), make_folder(tmp_path / "model", tokenizer="{}")
    memory.inspect(folder)
    memory.inspect(folder)
    assert inspection.folders == [folder, folder]


def test_the_service_is_given_the_memory_inside_the_block_alone() -> None:
    before = vars(fitness)["inspect_folder"]  # a memory too, if tests of the service run in the same process
    with remembered_stubs():
        assert vars(fitness)["inspect_folder"] not in (before, template_look.inspect_folder)
    assert vars(fitness)["inspect_folder"] is before
