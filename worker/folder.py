"""A job's folder, all that a child gets and all that it leaves:

job.json                                 what to do (`Assignment`)
in/                                      training, validation, pool, suites and a first adapter, verified
stage/                                   what a stage found out; a stage whose output is there is skipped
checkpoints/step-000100/                 of the training, the newest restored from an earlier attempt
out/metrics.csv safety.json adapter/     the results; the parent signs the adapter and packs it
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spard.recipe import RunSpec, located, run_from_mapping, to_mapping

_LOCK = "lock"


@dataclass(frozen=True, slots=True)
class Folder:
    """Where things lie below `root`."""

    root: Path

    @property
    def job(self) -> Path:
        return self.root / "job.json"

    @property
    def start(self) -> Path:
        """The adapter that the job goes on from, if it does."""
        return self.root / "in" / "start"

    @property
    def stage(self) -> Path:
        return self.root / "stage"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def out(self) -> Path:
        return self.root / "out"

    @property
    def metrics(self) -> Path:
        return self.out / "metrics.csv"

    @property
    def safety(self) -> Path:
        return self.out / "safety.json"

    @property
    def adapter(self) -> Path:
        return self.out / "adapter"

    @property
    def meeting(self) -> Path:
        """Where the processes of a job find each other."""
        return self.root / "meeting"

    @property
    def word(self) -> Path:
        """What one of them leaves that has too little GPU memory."""
        return self.root / "word"

    @property
    def archive(self) -> Path:
        return self.out / "adapter.tar.gz"


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a child is to do. `waived`: the gate is measured, and its decision does not hold the adapter back.

    `provenance` is what the manifest says of where everything came from.
    """

    job_id: str
    run: RunSpec
    cache_dir: Path
    waived: bool = False
    provenance: dict[str, Any] = field(default_factory=dict)
    holds: bool = False  # what the gate holds back is saved too, for a waiver
    processes: int = 1  # that train together, each on a GPU of its own


def write_assignment(folder: Folder, assignment: Assignment) -> None:
    """Paths of the run are kept relative to the folder."""
    facts = {
        "job_id": assignment.job_id,
        "run": to_mapping(assignment.run),
        "cache_dir": str(assignment.cache_dir),
        "waived": assignment.waived,
        "provenance": assignment.provenance,
        "holds": assignment.holds,
        "processes": assignment.processes,
    }
    folder.job.write_text(json.dumps(facts))


def read_assignment(folder: Folder) -> Assignment:
    facts: dict[str, Any] = json.loads(folder.job.read_text())
    run = located(run_from_mapping(facts["run"]), folder.root)
    rest = {name: facts[name] for name in ("waived", "provenance", "holds", "processes")}
    return Assignment(facts["job_id"], run, Path(facts["cache_dir"]), **rest)


@contextmanager
def new_folder(work_dir: Path, name: str) -> Iterator[Folder]:
    """An empty folder for one attempt, removed at the end; its lock tells others that somebody is at work."""
    folder = Folder(work_dir / name)
    for path in (folder.root / "in" / "suites", folder.stage, folder.checkpoints, folder.out):
        path.mkdir(mode=0o700, parents=True)
    lock = _locked(folder.root)
    try:
        yield folder
    finally:
        shutil.rmtree(folder.root, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def remove_abandoned(work_dir: Path) -> None:
    """Remove what workers that were killed left behind; the kernel has opened their locks."""
    for root in work_dir.glob("*/"):
        lock = _locked(root)
        if lock is not None:
            shutil.rmtree(root, ignore_errors=True)
            os.close(lock)


def _locked(root: Path) -> int | None:
    """The lock of a folder; None when somebody else has it, or the folder is gone."""
    try:
        lock = os.open(root / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
