"""What a child reaches: the interpreter, our packages, the models of its job and the machine's cache, and no secret."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.ops.children import secret_places
from app.settings import Settings
from spard.config import JudgeSpec
from spard.isolation import landlock, reach, walls
from spard.isolation.gate import Talks
from spard.isolation.walls import Walls
from worker.desk import Desk, KeyOf, Tell, judge_endpoints
from worker.read_ahead import Wanted
from worker.workdir import Folder, read_assignment


@dataclass(frozen=True, slots=True)
class Cell:
    """The walls of a worker's children. `hidden` holds secrets, wherever a provider has put them."""

    walls: Walls
    talks: Talks = "alone"  # where several processes train or answer together, and speak over sockets
    hidden: tuple[Path, ...] = ()
    key_of: KeyOf = lambda judge: None  # of the judges that are asked over an endpoint

    @classmethod
    def from_settings(cls, settings: Settings) -> Cell:
        """Return the strongest walls that this machine has, for children under these settings."""
        several = settings.gpus_per_job > 1 or settings.audit_engine.name == "vllm"
        talks: Talks = "nodes" if settings.nodes_per_job > 1 else "machine" if several else "alone"
        return cls(walls.find_walls(), talks, tuple(secret_places(settings)), settings.judge_key)

    @property
    def missing(self) -> tuple[str, ...]:
        """What keeps less from a child than there is to keep, in words for the provider."""
        if self.talks == "nodes" and self.walls.kind != "none" and not landlock.limits_ports():
            return (*self.walls.missing, "ports of other machines kept away (Landlock 4)")
        return self.walls.missing

    def command(self, command: Sequence[str]) -> list[str]:
        """Return what starts a child's command in here."""
        return walls.isolated_command(self.walls, command, talks=self.talks)

    def desk(self, folder: Folder, tell: Tell) -> Desk | None:
        """Return where the child asks its judges; None where none is asked over an endpoint."""
        judges = judge_endpoints(read_assignment(folder).run) if folder.job.exists() else []
        return Desk(judges, self.key_of, tell) if judges else None

    def ahead(self, wanted: Wanted) -> bytes | None:
        """Return what a child is told that is to read a base model ahead, and reaches no more until it has a job.

        None behind Landlock, where a child starts with its job.
        """
        if self.walls.kind == "landlock":
            return None
        return walls.ahead(wanted.line(), reach.model(wanted.model), map(str, self.hidden))

    def line(self, folder: Folder, given: Given) -> bytes:
        """Return what the child is told: from then on it reaches that folder, and what its job is given."""
        return walls.line(folder.root, given.readable, given.writable, map(str, self.hidden))


@dataclass(frozen=True, slots=True)
class Given:
    """The paths that a job's processes reach beside its folder, on every machine alike."""

    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()


def sandbox_paths(folder: Folder) -> Given:
    """Return what the job of a folder is given; asked before its child can change what it is made of."""
    if not folder.job.exists():
        return Given()
    assignment = read_assignment(folder)
    assignment.cache_dir.mkdir(parents=True, exist_ok=True)
    run = assignment.run
    models = (run.model, *((run.encoder,) if run.encoder else ()), *_judge_files(run.judge))
    return Given(tuple(path for model in models for path in reach.model(model)), (str(assignment.cache_dir),))


def _judge_files(judge: JudgeSpec) -> Iterator[str]:
    for each in judge.with_members():
        if each.name == "classifier":
            yield each.model
            if each.template:
                yield each.template
