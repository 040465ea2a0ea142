"""The sandbox of a child process.

A child can read the interpreter, our packages and the models of its job, can write to its folder and the machine's
cache, and cannot read any secret.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.ops.children import secret_places
from app.settings import Settings
from spard.config import JudgeSpec
from spard.isolation import landlock, sandbox
from spard.isolation.gate import Talks
from spard.isolation.sandbox import Sandbox
from worker.judge_calls import JudgeProxy, KeyOf, Tell, judge_endpoints
from worker.protocol import ModelRequest
from worker.workdir import Folder, read_assignment


@dataclass(frozen=True, slots=True)
class ChildSandbox:
    """The isolation of a worker's children; `hidden` are the paths of secrets, which no child may read."""

    sandbox: Sandbox
    talks: Talks = "alone"  # where several processes train or answer together, and speak over sockets
    hidden: tuple[Path, ...] = ()
    key_of: KeyOf = lambda judge: None  # of the judges that are asked over an endpoint

    @classmethod
    def from_settings(cls, settings: Settings) -> ChildSandbox:
        """Return the strongest isolation that this machine supports for children under these settings."""
        several = settings.gpus_per_job > 1 or settings.audit_engine.name == "vllm"
        talks: Talks = "nodes" if settings.nodes_per_job > 1 else "machine" if several else "alone"
        return cls(sandbox.find_sandbox(), talks, tuple(secret_places(settings)), settings.judge_key)

    @property
    def missing(self) -> tuple[str, ...]:
        """The parts of the isolation that this machine lacks, in words for the provider."""
        if self.talks == "nodes" and self.sandbox.kind != "none" and not landlock.limits_ports():
            return (*self.sandbox.missing, "ports of other machines kept away (Landlock 4)")
        return self.sandbox.missing

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command line that starts a child's command inside the sandbox."""
        return sandbox.isolated_command(self.sandbox, command, talks=self.talks)

    def judge_proxy(self, folder: Folder, tell: Tell) -> JudgeProxy | None:
        """Return the proxy that forwards the child's questions to its judges; None if no judge has an endpoint."""
        judges = judge_endpoints(read_assignment(folder).run) if folder.job.exists() else []
        return JudgeProxy(judges, self.key_of, tell) if judges else None

    def read_ahead_line(self, wanted: ModelRequest) -> bytes | None:
        """Return the line that makes a waiting child read a base model ahead; it opens no other path to the child.

        None under Landlock, whose rules cannot be widened later: there a child starts with its job.
        """
        if self.sandbox.kind == "landlock":
            return None
        return sandbox.ahead(wanted.line(), sandbox.model_paths(wanted.model), map(str, self.hidden))

    def line(self, folder: Folder, given: AllowedPaths) -> bytes:
        """Return the line that gives the child its folder, and access to it and to the paths in `given`."""
        return sandbox.line(folder.root, given.readable, given.writable, map(str, self.hidden))


@dataclass(frozen=True, slots=True)
class AllowedPaths:
    """The paths outside its folder that a job's processes may read or write, the same on every machine."""

    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()


def allowed_paths(folder: Folder) -> AllowedPaths:
    """Return the paths that the job of a folder may read and write.

    Call it before the child starts: afterward the child may have changed the assignment that it is read from.
    """
    if not folder.job.exists():
        return AllowedPaths()
    assignment = read_assignment(folder)
    assignment.cache_dir.mkdir(parents=True, exist_ok=True)
    run = assignment.run
    models = (run.model, *((run.encoder,) if run.encoder else ()), *_judge_files(run.judge))
    return AllowedPaths(
        tuple(path for model in models for path in sandbox.model_paths(model)), (str(assignment.cache_dir),)
    )


def _judge_files(judge: JudgeSpec) -> Iterator[str]:
    for each in judge.with_members():
        if each.name == "classifier":
            yield each.model
            if each.template:
                yield each.template
        if each.name == "local":
            yield each.model
            yield from _encoder_files(Path(each.model))


def _encoder_files(path: Path) -> Iterator[str]:
    """Yield the sentence encoder of a classifier that `spard judge train` has written; an invalid file names none."""
    try:
        encoder = json.loads(path.read_text(encoding="utf-8")).get("encoder")
    except (OSError, ValueError, AttributeError):
        return  # the child reads the file too, and says what is wrong with it
    if isinstance(encoder, str):
        yield encoder
