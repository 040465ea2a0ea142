"""A folder lives as long as its process, and nobody waits for another's lock."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, current_thread

import pytest

from app import locked_folders

WAIT_S = 600.0


def test_folders_in_use_are_not_abandoned(tmp_path: Path) -> None:
    for left in ("left-behind", ".left-behind-as-it-was-made"):
        (tmp_path / left).mkdir()
    (tmp_path / "file").touch()
    with locked_folders.use(tmp_path / "own", ["in/suites"]):
        locked_folders.remove_abandoned(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "own"]
        assert (tmp_path / "own" / "in" / "suites").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_has_just_begun_is_not_taken_for_abandoned(tmp_path: Path) -> None:
    stop = Event()

    def remove() -> None:
        while not stop.is_set():
            locked_folders.remove_abandoned(tmp_path)

    with ThreadPoolExecutor() as threads:
        removing = [threads.submit(remove) for _ in range(2)]
        try:
            for i in range(300):
                with locked_folders.use(tmp_path / f"job-a{i}", ["stage"]):
                    assert (tmp_path / f"job-a{i}" / "stage").is_dir()
        finally:
            stop.set()
    for each in removing:
        each.result()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_stopped_as_it_makes_its_folder_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, is_stopped, goes_on = locked_folders._lock, Event(), Event()

    def lock_and_stop(root: Path) -> int | None:
        locked = lock(root)
        if current_thread().name.startswith("stopped"):
            is_stopped.set()
            goes_on.wait(WAIT_S)
        return locked

    monkeypatch.setattr(locked_folders, "_lock", lock_and_stop)
    with ThreadPoolExecutor(thread_name_prefix="stopped") as threads:
        stopped = threads.submit(locked_folders.create, tmp_path / "stopped")
        assert is_stopped.wait(WAIT_S)
        with ThreadPoolExecutor() as others:
            making = others.submit(locked_folders.create, tmp_path / "other")
            removing = others.submit(locked_folders.remove_abandoned, tmp_path)
            os.close(making.result(WAIT_S))
            removing.result(WAIT_S)
        goes_on.set()
        os.close(stopped.result(WAIT_S))
    assert (tmp_path / "stopped").is_dir()


def test_a_folder_of_the_same_name_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "own" / "kept").mkdir(parents=True)
    with pytest.raises(OSError, match="not empty"):
        locked_folders.create(tmp_path / "own")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["kept", "own"]
