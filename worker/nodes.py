"""The other machines of a job that has several, as its worker sees them: on each a follower (`worker.follower`).

They come before the job is claimed, are told when its child starts, and say when their ranks have ended. When one is
lost, or its ranks have ended and ours have not noticed, the attempt is over: no rank waits for one that is gone.

kind      from       fields
join      follower   job, token, node: which one it is, from 1
start     worker     folder, readable, writable: the job's folder and what else its processes reach
leaving   follower   it was told to stop: the ranks are to save
ended     follower   is_done, is_out_of_memory, is_killed, memory: how its child has ended, and why
end       worker     the attempt is over
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from threading import Event

import structlog

from app.errors import Unfit
from app.settings import Settings
from worker.cell import Given
from worker.failures import NODE_LOST, OUT_OF_MEMORY, RANK_LOST, Failed, why_killed
from worker.memory_kills import Memory
from worker.wire import LOST_S, Wire
from worker.workdir import Folder, Meeting, read_assignment

log = structlog.get_logger(__name__)

_LOOK_S = 0.2
_JOIN_S = 5.0  # from a connection until it has said who it is
_GRACE_S = 10.0  # from the end of one machine's ranks until ours say why
_EXPLAIN_S = 2.0  # from an end of ours that nothing explains until another machine does


class Nodes:
    """Those of one attempt. On one machine there are none, and nothing is done. `Unfit` where its port is taken."""

    def __init__(self, settings: Settings, job_id: str, token: int | None, lost_s: float = LOST_S) -> None:
        self._count, self._wait_s, self._lost_s = settings.nodes_per_job, settings.nodes_wait_s, lost_s
        self._of = {"job": job_id, "token": token}
        self._wires: dict[int, Wire] = {}
        self._ended: dict[int, float] = {}  # node -> when its child has
        self._folder: Folder | None = None
        self._listener = _listener(settings.nodes_port) if self._count > 1 else None

    def gather(self, stop: Event) -> bool:
        """Wait until all are there; whether they are, before `stop` is set or the time is over."""
        give_up_at = time.monotonic() + self._wait_s
        while self._listener and len(self._wires) < self._count - 1:
            if stop.is_set() or time.monotonic() > give_up_at or self._is_any_lost():
                log.warning("not all machines are there", there=sorted(self._wires), wanted=self._count - 1)
                return False
            self._accept(self._listener)
        return True

    def start(self, folder: Folder, given: Given) -> None:
        """Tell all to start their share of the job in a folder."""
        if not self._wires or read_assignment(folder).audits:  # one machine does these
            return
        self._folder = folder
        address = next(iter(self._wires.values())).own_address
        folder.meeting.write_text(json.dumps(asdict(Meeting(self._count, address, _free_port()))))
        for wire in self._wires.values():
            wire.tell({"kind": "start", "folder": str(folder.root), **asdict(given)})

    def check(self, ours_ended: bool = False) -> None:
        """Raise `Failed` when a machine is lost, or its ranks have ended so that ours wait in vain.

        `ours_ended`: they have, and nothing that they said explains it.
        """
        give_up_at = time.monotonic() + _EXPLAIN_S
        while self._wires:
            for node, wire in self._wires.items():
                is_lost = wire.is_lost.is_set()  # then all that it has said can be heard
                while message := wire.next_message(0.0):
                    self._hear(node, message)
                if self._folder and is_lost:
                    log.error("a machine of the job is lost", node=node)
                    raise Failed(NODE_LOST)
            if any(time.monotonic() - at > _GRACE_S for at in self._ended.values()):
                raise Failed(RANK_LOST)
            if not ours_ended or self._ended or time.monotonic() > give_up_at:
                return
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Tell all followers that the attempt is over."""
        for wire in self._wires.values():
            wire.tell({"kind": "end"})
            wire.close()
        self._wires.clear()
        if self._listener:
            self._listener.close()
            self._listener = None

    def _hear(self, node: int, message: Mapping[str, object]) -> None:
        match message:
            case {"kind": "leaving"} if self._folder:
                log.info("a machine of the job is to stop", node=node)
                self._folder.stop.touch()
            case {"kind": "ended", "is_out_of_memory": True}:
                raise Failed(OUT_OF_MEMORY)
            case {"kind": "ended", "is_killed": True, "memory": memory}:
                raise Failed(why_killed(Memory(memory) if isinstance(memory, str) else None))
            case {"kind": "ended", "is_done": False}:
                log.error("ranks of another machine have ended", node=node)
                self._ended[node] = time.monotonic()

    def _is_any_lost(self) -> bool:
        return any(wire.is_lost.is_set() for wire in self._wires.values())

    def _accept(self, listener: socket.socket) -> None:
        """Take the next follower of this attempt; whoever else connects is sent away."""
        try:
            end, _ = listener.accept()
        except TimeoutError:
            return
        wire = Wire(end, self._lost_s)
        match wire.next_message(_JOIN_S):
            case {"kind": "join", "job": job, "token": token, "node": int(node)} if (
                {"job": job, "token": token} == self._of and 0 < node < self._count and node not in self._wires
            ):
                log.info("a machine of the job is there", node=node)
                self._wires[node] = wire
            case _:
                wire.close()


def _listener(port: int) -> socket.socket:
    """Return a socket that hears of every address of this machine."""
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    try:
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=has_both)
    except OSError as error:
        raise Unfit(f"SPARD_NODES_PORT is {port}, where this machine cannot listen: {error}.") from error
    listener.settimeout(_LOOK_S)
    return listener


def _free_port() -> int:
    """Return a port that the kernel hands out: a child behind walls can listen on no other."""
    with socket.create_server(("", 0)) as found:
        return int(found.getsockname()[1])
