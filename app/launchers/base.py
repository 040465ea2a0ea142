"""The protocol of launchers, and the work that they start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Away(Exception):
    """The cluster does not answer or is overloaded; the request may or may not have been carried out."""


class Refused(Exception):
    """The cluster refuses the request, and repeating it will not help."""


@dataclass(frozen=True, slots=True)
class Work:
    """One attempt of a job, which can claim the job only while the lease's token is `token`.

    `gpus` is the number of GPUs of each of its `nodes`; None means as many as the pod template has.
    """

    job_id: str
    token: int
    gpus: int | None = None
    nodes: int = 1


@dataclass(frozen=True, slots=True)
class Started:
    """Work that the cluster has.

    name, uid  of the cluster's object
    ended_s    seconds since it ended; None while it has not
    reason     why it does not start, in words for the job's owner; None if it does
    """

    name: str
    uid: str
    work: Work
    ended_s: float | None = None
    reason: str | None = None


class Launcher(Protocol):
    """Starts and stops work on a cluster. All methods are idempotent; all may raise `Away` or `Refused`."""

    def list_started(self) -> list[Started]:
        """Return all work that the cluster has; the list may be slightly outdated."""

    def start(self, work: Work) -> None:
        """Start work, unless the cluster has it already."""

    def stop(self, started: Started) -> None:
        """Stop the process of an attempt with SIGTERM, if the cluster still has it."""
