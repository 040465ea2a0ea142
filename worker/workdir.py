"""The folder of one attempt: the files that a child gets and the files that it leaves.

job.json                                 the assignment (`Assignment`)
in/                                      training and validation file, pool, suites and a first adapter, verified
stage/                                   the outputs of stages; a stage whose output exists is skipped
checkpoints/step-000100/                 resume states of the training, the newest restored from an earlier attempt
epochs/step-000120/adapter/              the adapter at an epoch's end: a checkpoint that may be released
out/metrics.csv safety.json adapter/     the results; the parent signs and packs the adapter
out/transcripts.jsonl                    prompts and replies of the audit, if the job keeps them
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app import locked_folders
from spard.config.run_spec import RunSpec, resolve_paths, run_from_mapping, to_mapping
from spard.release.figures import TRANSCRIPTS
from spard.release.task_check import TASK_REPLIES

NODE = "SPARD_NODE"  # environment variable of a child: the number of its machine in the job; not set means 0

_REST = (
    *("waived", "provenance", "holds", "processes", "patience_s", "checkpoint_prompts", "taken_until"),
    "kept_checkpoints",
    *("keeps_transcripts", "audits", "weights", "pass_tokens", "rendering"),
)


@dataclass(frozen=True, slots=True)
class Folder:
    """The paths of an attempt's folder below `root`."""

    root: Path

    @property
    def job(self) -> Path:
        """The assignment, as JSON."""
        return self.root / "job.json"

    @property
    def start(self) -> Path:
        """The adapter that the job continues from, or that a later audit audits."""
        return self.root / "in" / "start"

    @property
    def stage(self) -> Path:
        """The outputs of the stages, one file for each."""
        return self.root / "stage"

    @property
    def has_selected(self) -> bool:
        """Return True if an earlier attempt has selected the safe set."""
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
        """The results, which the parent publishes."""
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
        """The result of a later audit, as JSON."""
        return self.results / "later_audit.json"

    @property
    def adapter(self) -> Path:
        """The adapter, which the parent signs here."""
        return self.results / "adapter"

    @property
    def stop(self) -> Path:
        """A marker file: once it exists, the ranks of the job save and stop."""
        return self.root / "stop"

    @property
    def audit_last(self) -> Path:
        """A marker file: if it exists when the job stops, its last checkpoints are audited first."""
        return self.root / "audit_last"

    @property
    def meeting(self) -> Path:
        """The address where the ranks of a job on several machines meet, as JSON."""
        return self.root / "meeting.json"

    def word(self, rank: int) -> Path:
        """Return the file into which a failed rank writes its failure."""
        return self.root / f"word.{rank}"

    @property
    def archive(self) -> Path:
        """The signed adapter as one file, packed by the parent."""
        return self.results / "adapter.tar.gz"


@dataclass(frozen=True, slots=True)
class Assignment:
    """The job as its child gets it, stored as `job.json`.

    `waived`: the audit runs, but the gate's decision does not hold the adapter back. `provenance` is written to the
    manifest: the inputs by name, version and digest.
    """

    job_id: str
    run: RunSpec
    cache_dir: Path
    waived: bool = False
    provenance: Mapping[str, object] = field(default_factory=dict)
    holds: bool = False  # an adapter that the gate holds back is saved too, for a waiver
    processes: int = 1  # ranks on all machines together, one for each GPU
    patience_s: float = 0.0  # how long to wait for a judge that does not answer
    checkpoint_prompts: int | None = None  # prompts of each suite for a checkpoint's audit; None: no checkpoints
    taken_until: int = 0  # the last step whose checkpoint an earlier attempt has stored
    kept_checkpoints: int | None = None  # checkpoints that a finished job keeps, its own adapter included; None: all
    keeps_transcripts: bool = False  # every prompt of the audit is kept with its reply
    audits: bool = False  # a later audit: train nothing, audit the adapter in `Folder.start`
    weights: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of the base model's files, by file name
    rendering: Mapping[str, Any] | None = None  # rendering of the base model's chat template, from the catalog
    pass_tokens: int | None = None  # padded tokens in one forward pass; None: chosen by free memory


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The number of machines of a job and the address where their ranks meet, which one machine does not need."""

    nodes: int = 1
    address: str = "127.0.0.1"
    port: int = 0


def read_meeting(folder: Folder) -> Rendezvous:
    """Return where the ranks of a folder's job meet; the default for one machine if the folder does not say."""
    return Rendezvous(**json.loads(folder.meeting.read_text())) if folder.meeting.exists() else Rendezvous()


def write_assignment(folder: Folder, assignment: Assignment) -> None:
    """Write the assignment to `job.json`; the run's paths stay relative to the folder."""
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
    """Read the assignment that the parent has written, with the run's paths resolved below this folder."""
    facts: dict[str, Any] = json.loads(folder.job.read_text())
    run = resolve_paths(run_from_mapping(facts["run"]), folder.root)
    rest = {name: facts[name] for name in _REST}
    return Assignment(facts["job_id"], run, Path(facts["cache_dir"]), **rest)


@contextmanager
def new_folder(work_dir: Path, name: str) -> Iterator[Folder]:
    """Create an empty, locked folder for one attempt and remove it afterward."""
    folder = Folder(work_dir / name)
    inner = (folder.root / "in" / "suites", folder.stage, folder.resume_states, folder.results)
    with locked_folders.use(folder.root, [path.relative_to(folder.root).as_posix() for path in inner]):
        yield folder
