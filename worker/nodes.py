"""The worker's side of a job on several machines: connections to the follower (`worker.follower`) on each other one.

The followers connect before the job is claimed, start their ranks with the worker's child, and report when these have
ended. When a follower is lost, or its ranks have ended and ours have not noticed, the attempt ends, so that no rank
waits for one that is gone.

kind      from       fields
join      follower   job, token, node: the number of its machine, from 1
start     worker     folder, readable, writable: the job's folder and the other paths that its processes may reach
leaving   follower   it has to stop: the ranks should save
ended     follower   is_done, is_out_of_memory, is_killed, memory: how its child has ended, and why
end       worker     the attempt is over

Messages are lines of JSON, with heartbeats in between. A peer that is silent for too long, or whose connection has
ended, is lost. A line that is not a message, or is too long, ends the connection.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread

import structlog

from app.errors import Unfit
from app.settings import Settings
from worker.failures import NODE_LOST, OUT_OF_MEMORY, RANK_LOST, Failed, Memory, why_killed
from worker.protocol import MAX_LINE, Message, parse
from worker.sandbox import AllowedPaths
from worker.workdir import Folder, Rendezvous, read_assignment

LOST_S = 30.0  # of silence, after which the peer is lost
_BEATS = 10  # heartbeats in that time
log = structlog.get_logger(__name__)
_LOOK_S = 0.2
_JOIN_S = 5.0  # for a new connection to send `join`
_GRACE_S = 10.0  # for our ranks to report why, after another machine's ranks have ended
_EXPLAIN_S = 2.0  # for another machine to report why, after our ranks ended without a reason


class Wire:
    """One end of a connection.

    `is_lost` is set when the peer is gone; `next_message` still returns the messages that it sent before.
    """

    def __init__(self, end: socket.socket, lost_s: float = LOST_S) -> None:
        end.settimeout(lost_s)
        self._end, self._sending = end, Lock()
        self._heard: SimpleQueue[Message] = SimpleQueue()
        self.is_lost = Event()
        for work, seconds in ((self._read, lost_s), (self._beat, lost_s / _BEATS)):
            Thread(target=work, args=(seconds,), daemon=True).start()

    @property
    def own_address(self) -> str:
        """This machine's address as the peer sees it."""
        return str(self._end.getsockname()[0]).removeprefix("::ffff:")

    def tell(self, message: Message) -> None:
        """Send a message; if that fails, drop it and set `is_lost`."""
        try:
            with self._sending:
                self._end.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # a timeout is one
            self.is_lost.set()

    def next_message(self, timeout_s: float) -> Message | None:
        """Return the next message; None if none came within `timeout_s`."""
        with suppress(Empty):
            return self._heard.get(timeout=timeout_s)
        return None

    def close(self) -> None:
        """Close the connection and set `is_lost`."""
        self.is_lost.set()
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _read(self, seconds: float) -> None:
        with suppress(OSError), self._end.makefile("rb") as lines:
            while message := parse(lines.readline(MAX_LINE)):
                if message["kind"] != "beat":
                    self._heard.put(message)
        self.is_lost.set()

    def _beat(self, seconds: float) -> None:
        while not self.is_lost.wait(seconds):
            self.tell({"kind": "beat"})


class Nodes:
    """The other machines of one attempt; for a job on one machine every method does nothing.

    The constructor raises `Unfit` if `SPARD_NODES_PORT` is taken.
    """

    def __init__(self, settings: Settings, job_id: str, token: int | None, lost_s: float = LOST_S) -> None:
        self._count, self._wait_s, self._lost_s = settings.nodes_per_job, settings.nodes_wait_s, lost_s
        self._of = {"job": job_id, "token": token}
        self._wires: dict[int, Wire] = {}
        self._ended: dict[int, float] = {}  # node -> when its ranks ended without being done
        self._folder: Folder | None = None
        self._listener = _listener(settings.nodes_port) if self._count > 1 else None

    def gather(self, stop: Event) -> bool:
        """Wait until all followers have joined; return False on timeout, on a lost one, or when `stop` is set."""
        give_up_at = time.monotonic() + self._wait_s
        while self._listener and len(self._wires) < self._count - 1:
            if stop.is_set() or time.monotonic() > give_up_at or self._is_any_lost():
                log.warning("not all machines are there", there=sorted(self._wires), wanted=self._count - 1)
                return False
            self._accept(self._listener)
        return True

    def start(self, folder: Folder, given: AllowedPaths) -> None:
        """Write where the ranks meet, and tell all followers to start their ranks in the job's folder."""
        if not self._wires or read_assignment(folder).audits:  # one machine does these
            return
        self._folder = folder
        address = next(iter(self._wires.values())).own_address
        folder.meeting.write_text(json.dumps(asdict(Rendezvous(self._count, address, _free_port()))))
        for wire in self._wires.values():
            wire.tell({"kind": "start", "folder": str(folder.root), **asdict(given)})

    def check(self, ours_ended: bool = False) -> None:
        """Raise `Failed` when a follower is lost, or when its ranks have ended and ours wait for them in vain.

        `ours_ended`: our ranks have ended without a reason; then wait up to 2 s for another machine to report one.
        """
        give_up_at = time.monotonic() + _EXPLAIN_S
        while self._wires:
            for node, wire in self._wires.items():
                is_lost = wire.is_lost.is_set()  # read before its messages: once it is set, no more can arrive
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
        """Accept the next connection, and keep it if it is a follower of this attempt that has not joined yet."""
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
    """Return a socket that listens on every address of this machine, IPv6 and IPv4 where possible."""
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    try:
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=has_both)
    except OSError as error:
        raise Unfit(f"SPARD_NODES_PORT is {port}, where this machine cannot listen: {error}.") from error
    listener.settimeout(_LOOK_S)
    return listener


def _free_port() -> int:
    """Return a free port of the kernel's ephemeral range, the only ports that an isolated child may listen on."""
    with socket.create_server(("", 0)) as found:
        return int(found.getsockname()[1])
