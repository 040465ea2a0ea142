"""The folder of a job: all that a child gets and all that it leaves.

job.json                                 what to do (`Assignment`)
in/                                      training, validation, pool, suites and a first adapter, verified
stage/                                   what a stage found out; a stage whose output is there is skipped
checkpoints/step-000100/                 resume states of the training, the newest restored from an earlier attempt
epochs/step-000120/adapter/              the adapter at an epoch's end: a checkpoint that may be released
out/metrics.csv safety.json adapter/     the results; the parent signs the adapter and packs it
out/transcripts.jsonl                    what the audit asked and heard, where the job keeps it
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spard.config.run_spec import RunSpec, resolve_paths, run_from_mapping, to_mapping
from spard.release.figure_records import TRANSCRIPTS
from spard.release.task_check import TASK_REPLIES

NODE = "SPARD_NODE"  # of a child's environment: the number of its machine among those of its job, 0 unless it is there

_LOCK = "lock"
_REST = (
    *("waived", "provenance", "holds", "processes", "patience_s", "checkpoint_prompts", "taken_until"),
    "kept_checkpoints",
    *("keeps_transcripts", "audits", "weights", "pass_tokens", "rendering"),
)


@dataclass(frozen=True, slots=True)
class Folder:
    """Where things lie below `root`."""

    root: Path

    @property
    def job(self) -> Path:
        """The assignment, as JSON."""
        return self.root / "job.json"

    @property
    def start(self) -> Path:
        """The adapter that the job goes on from, or audits, if it does."""
        return self.root / "in" / "start"

    @property
    def stage(self) -> Path:
        """What the stages found out, a file for each."""
        return self.root / "stage"

    @property
    def has_selected(self) -> bool:
        """Whether an earlier attempt has chosen the safe set."""
        return (self.stage / "select.json").exists()

    @property
    def resume_states(self) -> Path:
        """Resume states, each under the name of its step."""
        return self.root / "checkpoints"

    @property
    def epochs(self) -> Path:
        """The adapters at the ends of epochs, each under the name of its step."""
        return self.root / "epochs"

    @property
    def results(self) -> Path:
        """The results, from where the parent publishes them."""
        return self.root / "out"

    @property
    def metrics(self) -> Path:
        """The metrics of each step, as CSV."""
        return self.results / "metrics.csv"

    @property
    def safety(self) -> Path:
        """The safety report, as JSON."""
        return self.results / "safety.json"

    @property
    def transcripts(self) -> Path:
        """The audit's prompts and replies, if the job keeps them."""
        return self.results / TRANSCRIPTS

    @property
    def task_replies(self) -> Path:
        """The customer's requests with the replies of both models, where some were asked."""
        return self.results / TASK_REPLIES

    @property
    def later_audit(self) -> Path:
        """What a job that audits alone has found, as JSON."""
        return self.results / "later_audit.json"

    @property
    def adapter(self) -> Path:
        """The adapter, which the parent signs here."""
        return self.results / "adapter"

    @property
    def stop(self) -> Path:
        """What is there once the ranks of a job are to save and stop."""
        return self.root / "stop"

    @property
    def audit_last(self) -> Path:
        """What is there once a job that is told to stop is to audit its last ends of epochs before."""
        return self.root / "audit_last"

    @property
    def meeting(self) -> Path:
        """Where the ranks of a job on several machines meet, as JSON."""
        return self.root / "meeting.json"

    def word(self, rank: int) -> Path:
        """Return what a rank of a job leaves that has failed."""
        return self.root / f"word.{rank}"

    @property
    def archive(self) -> Path:
        """The signed adapter as one file, packed by the parent."""
        return self.results / "adapter.tar.gz"


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a child is to do. `waived`: the gate is measured, and its decision does not hold the adapter back.

    `provenance` is what the manifest says of where everything came from.
    """

    job_id: str
    run: RunSpec
    cache_dir: Path
    waived: bool = False
    provenance: Mapping[str, object] = field(default_factory=dict)
    holds: bool = False  # what the gate holds back is saved too, for a waiver
    processes: int = 1  # that train together, each on a GPU of its own, on all machines
    patience_s: float = 0.0  # with a judge that does not answer
    checkpoint_prompts: int | None = None  # of each suite that a checkpoint is asked; None: there are no checkpoints
    taken_until: int = 0  # the last step whose checkpoint an earlier attempt has left
    kept_checkpoints: int | None = None  # of a job that has ended, its own adapter among them; None: all
    keeps_transcripts: bool = False  # every prompt of the audit is kept with its reply
    audits: bool = False  # nothing is trained: what lies in `Folder.start` is audited
    weights: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of the base model's files by their names
    rendering: Mapping[str, Any] | None = None  # of the base model's chat template, as the catalog has it
    pass_tokens: int | None = None  # padded ones that go through the model at once; None: as memory is free


@dataclass(frozen=True, slots=True)
class Meeting:
    """How many machines a job has, and where their ranks meet; on one they need no place."""

    nodes: int = 1
    address: str = "127.0.0.1"
    port: int = 0


def read_meeting(folder: Folder) -> Meeting:
    """Return where the ranks of a folder's job meet."""
    return Meeting(**json.loads(folder.meeting.read_text())) if folder.meeting.exists() else Meeting()


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
        "patience_s": assignment.patience_s,
        "checkpoint_prompts": assignment.checkpoint_prompts,
        "taken_until": assignment.taken_until,
        "kept_checkpoints": assignment.kept_checkpoints,
        "keeps_transcripts": assignment.keeps_transcripts,
        "audits": assignment.audits,
        "weights": dict(assignment.weights),
        "pass_tokens": assignment.pass_tokens,
        "rendering": assignment.rendering,
    }
    folder.job.write_text(json.dumps(facts))


def read_assignment(folder: Folder) -> Assignment:
    """Read what the parent has written; paths in it become those of this folder."""
    facts: dict[str, Any] = json.loads(folder.job.read_text())
    run = resolve_paths(run_from_mapping(facts["run"]), folder.root)
    rest = {name: facts[name] for name in _REST}
    return Assignment(facts["job_id"], run, Path(facts["cache_dir"]), **rest)


@contextmanager
def new_folder(work_dir: Path, name: str) -> Iterator[Folder]:
    """Make an empty folder for one attempt and remove it at the end; its lock shows others that it is in use."""
    folder = Folder(work_dir / name)
    with lock_work_dir(work_dir):
        for path in (folder.root / "in" / "suites", folder.stage, folder.resume_states, folder.results):
            path.mkdir(mode=0o700, parents=True)
        lock = _lock_folder(folder.root)
    try:
        yield folder
    finally:
        shutil.rmtree(folder.root, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def remove_abandoned(work_dir: Path) -> None:
    """Remove what workers that were killed left behind; the kernel has opened their locks."""
    with lock_work_dir(work_dir):
        for root in work_dir.glob("*/"):
            lock = _lock_folder(root)
            if lock is not None:
                shutil.rmtree(root, ignore_errors=True)
                os.close(lock)


@contextmanager
def lock_work_dir(work_dir: Path) -> Iterator[None]:
    """Keep other workers from beginning and removing folders, so that none is seen before it is locked.

    The lock is a file of its own: network file systems lock only what is open for writing, which a folder never is.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    handle = os.open(work_dir.with_name(f"{work_dir.name}.lock"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _lock_folder(root: Path) -> int | None:
    """Lock a folder; None if another process holds the lock, or the folder is gone."""
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
