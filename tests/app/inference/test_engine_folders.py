"""The folders of engines while several API processes start at the same time."""

from __future__ import annotations

import fcntl
from pathlib import Path
from threading import Thread

import pytest

from app.inference.embedded import EngineFolders


def test_a_folder_is_not_taken_for_abandoned_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = EngineFolders(tmp_path), EngineFolders(tmp_path)
    starting = Thread(target=second.own_folder)
    lock = fcntl.flock

    def lock_late(descriptor: int, operation: int) -> None:
        own = [path for path in tmp_path.iterdir() if (path / "lock").exists()]
        if own and starting.ident is None:  # the first folder's lock exists, and is not locked yet
            starting.start()
            starting.join(timeout=0.5)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    own = first.own_folder()
    assert starting.ident is not None
    starting.join()
    assert (own / "lock").exists()
    assert second.own_folder() != own


def test_the_folder_of_a_process_that_is_gone_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "left"
    left.mkdir()
    (left / "lock").touch()
    own = EngineFolders(tmp_path).own_folder()
    assert (left.exists(), own.exists()) == (False, True)
