"""What a launcher can do, and what it says of the work that it has started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Away(Exception):
    """The cluster does not answer, or asks to be left alone for now; whether it did what was asked is not known."""


class Refused(Exception):
    """The cluster does not do this, however often it is asked."""


@dataclass(frozen=True, slots=True)
class Work:
    """One attempt of a job: it may be claimed while its lease's token is `token`. `gpus` None: the template's.

    `gpus` are those of each of its `nodes`.
    """

    job_id: str
    token: int
    gpus: int | None = None
    nodes: int = 1


@dataclass(frozen=True, slots=True)
class Started:
    """Work that the cluster has. `ended_s`: seconds since it ended; `reason`: why it does not start, for its owner."""

    name: str
    uid: str
    work: Work
    ended_s: float | None = None
    reason: str | None = None


class Launcher(Protocol):
    """Every call may raise `Away`; `start` may raise `Refused` too. What is asked twice is done once."""

    def list_started(self) -> list[Started]:
        """Return all work that the cluster has, perhaps as it was some time ago."""

    def start(self, work: Work) -> None:
        """Start work, unless the cluster has it."""

    def stop(self, started: Started) -> None:
        """Stop the process of an attempt with SIGTERM, if the cluster still has it."""
