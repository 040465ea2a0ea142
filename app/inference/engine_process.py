"""One engine: an isolated process with one base model, driven by JSON lines over its standard streams.

It gets files and no credentials. Threads write to and read from it, so that the event loop never blocks on it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import IO, cast

from app.errors import AppError, InvalidState, TooManyRequests, Unavailable
from app.inference.protocol import MAX_LINE, Ask, EngineMessage, Proof, engine_lost, refusal_error
from app.inference.released import NotServed
from app.ops.children import environment, secret_places
from app.ops.processes import python
from app.settings import Settings
from spard.isolation import sandbox

log = logging.getLogger(__name__)

_EXPECTED_S = 5.0  # for the requests that waited to be resumed by a busy event loop


class Stream:
    """The messages of an engine for one request, passed from the reading thread to the request's event loop."""

    def __init__(self, number: int, cancel: Callable[[int], None], project: str | None = None) -> None:
        self.number, self._cancel, self.project = number, cancel, project
        self._loop = asyncio.get_running_loop()
        self._said: asyncio.Queue[EngineMessage | AppError] = asyncio.Queue()

    def put(self, said: EngineMessage | AppError) -> None:
        """Add a message, or an error that ends the stream; safe from any thread."""
        with suppress(RuntimeError):  # the event loop has closed
            self._loop.call_soon_threadsafe(self._said.put_nowait, said)

    async def next(self, timeout_s: float) -> EngineMessage:
        """Return the next message; raise the error that ends the stream, or `engine_timeout` after `timeout_s`."""
        try:
            said = await asyncio.wait_for(self._said.get(), timeout_s)
        except TimeoutError:
            raise Unavailable("The engine did not answer in time; try again.", code="engine_timeout") from None
        if isinstance(said, AppError):
            raise said
        if said["kind"] == "failed":
            raise refusal_error(said)
        return said

    def cancel(self) -> None:
        """Make the engine stop this request, and read no more of it."""
        self._cancel(self.number)


class EngineProcess:
    """A running engine process.

    Create it in a thread that outlives it, because the kernel ends it with that thread. `ready` is a future of the
    engine's `ready` message, or of the error that kept it from starting. `used_at` and `heard_at` are the monotonic
    times of the last request and of the engine's last message.
    """

    def __init__(
        self,
        settings: Settings,
        source: str,
        revision: str | None,
        folder: Path,
        quantization: str = "none",
        template_arguments: str = "{}",
    ) -> None:
        self.source, self.folder, self.used_at = source, folder, time.monotonic()
        self.heard_at = self.used_at
        self._expected_until = 0.0  # the requests that waited for the start or an adapter come until then
        self._numbers, self._lock, self._start_s = count(1), Lock(), settings.serving_start_s
        self._rows = settings.serving_rows
        self._streams: dict[int, Stream] = {}
        self._loads: dict[str, Future[Proof]] = {}
        self.ready: Future[EngineMessage] = Future()
        order = {
            "source": source,
            "revision": revision,
            "quantization": quantization,
            "template_arguments": json.loads(template_arguments),
            "device": settings.serving_device,
            "threads": settings.worker_threads,
            "rows": settings.serving_rows,
            "adapter_bytes": int(settings.serving_adapters_mb * (1 << 20)),
        }
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        self._process = subprocess.Popen(  # noqa: S603 - the command is ours
            sandbox.isolated_command(sandbox.find_sandbox(), python("worker.engine", json.dumps(order))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(settings, settings.serving_device),
            start_new_session=True,
        )
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        hidden = map(str, secret_places(settings))
        self._lines.put(sandbox.line(folder, sandbox.model_paths(source), (), hidden))
        for run, stream in ((self._write, self._process.stdin), (self._read, self._process.stdout)):
            Thread(target=run, args=(cast(IO[bytes], stream),), daemon=True).start()

    @property
    def is_alive(self) -> bool:
        """Return True while the process runs."""
        return self._process.poll() is None

    @property
    def is_idle(self) -> bool:
        """Return True if no request waits for a reply, for the engine's start, or for an adapter.

        A start or load that takes longer than `serving_start_s` no longer counts, since its requests have timed out.
        """
        now, is_loading = time.monotonic(), bool(self._loads) or not self.ready.done()
        is_expecting = now < self._expected_until or (is_loading and now - self.used_at < self._start_s)
        return not self._streams and not is_expecting

    @property
    def silent_s(self) -> float:
        """Seconds since the engine's last message; a ready engine sends one every second. 0 before it is ready."""
        return time.monotonic() - self.heard_at if self.ready.done() else 0.0

    @property
    def pid(self) -> int:
        """The process id of the outermost process."""
        return self._process.pid

    def generate(self, project: str, ask: Ask, most: int) -> Stream:
        """Send a request and return the stream of its messages.

        Raises 429 `engine_overloaded` if the engine has `most` requests already and the project has its share of them,
        the number of rows.
        """
        with self._lock:
            own = sum(each.project == project for each in self._streams.values())
            if len(self._streams) >= most and own >= min(most, self._rows):
                error = TooManyRequests("Too many replies are being written at the moment.", code="engine_overloaded")
                error.retry_after_s = 2
                raise error
            stream = Stream(next(self._numbers), self._forget, project)
            self._streams[stream.number] = stream
            self.used_at, self._expected_until = time.monotonic(), 0.0
        self._tell({"op": "generate", "id": stream.number, "project": project, "ask": ask})
        if not self.is_alive:
            stream.put(engine_lost())
        return stream

    def load(self, adapter: str, provide: Callable[[Path], str]) -> Future[Proof]:
        """Load an adapter and return a future of its proof; calls during a load share one future.

        `provide` unpacks the adapter into the given folder and returns the SHA-256 of its manifest.
        """
        with self._lock:
            found = self._loads.get(adapter)
            if found is None:
                found = self._loads[adapter] = Future()
                Thread(target=self._provide, args=(adapter, provide, found), daemon=True).start()
        return found

    def end(self, error: AppError | None = None) -> None:
        """Kill the process; pending replies, loads and the start fail with `error`, or else with `engine_lost`."""
        if error is not None:
            self._note_start(error)
            for stream in list(self._streams.values()):
                stream.put(error)
            for adapter in list(self._loads):
                self._settle(adapter, error)
        self._process.kill()
        self._process.wait()
        self._lines.put(None)

    def _provide(self, adapter: str, provide: Callable[[Path], str], load: Future[Proof]) -> None:
        folder = self.folder / "adapters" / adapter
        try:
            manifest = provide(folder)
        except BaseException as error:
            self._settle(adapter, error if isinstance(error, AppError) else engine_lost())
            log.warning("an adapter cannot be served: %s", error)
        else:
            self._tell({"op": "load", "adapter": adapter, "folder": str(folder), "manifest_sha256": manifest})
            if not self.is_alive:
                self._settle(adapter, engine_lost())

    def _note_start(self, how: EngineMessage | AppError) -> None:
        """Set the result of `ready`, unless it has one already."""
        with self._lock:
            if self.ready.done():
                return
            if isinstance(how, AppError):
                self.ready.set_exception(how)
            else:
                self._expected_until = time.monotonic() + _EXPECTED_S
                self.ready.set_result(how)

    def _settle(self, adapter: str, result: Proof | AppError) -> None:
        with self._lock:
            load = self._loads.pop(adapter, None)
            if not isinstance(result, AppError):
                self._expected_until = time.monotonic() + _EXPECTED_S
        if load is None:
            return
        if isinstance(result, AppError):
            load.set_exception(result)
        else:
            load.set_result(result)

    def _forget(self, number: int) -> None:
        with self._lock:
            is_there = self._streams.pop(number, None)
            self.used_at = time.monotonic()
        if is_there:
            self._tell({"op": "cancel", "id": number})

    def _tell(self, line: object) -> None:
        self._lines.put(json.dumps(line).encode() + b"\n")

    def _write(self, stdin: IO[bytes]) -> None:
        with suppress(OSError), stdin:
            while (line := self._lines.get()) is not None:
                stdin.write(line)
                stdin.flush()

    def _read(self, stdout: IO[bytes]) -> None:
        with stdout:
            while line := stdout.readline(MAX_LINE):
                with suppress(ValueError):
                    self._hear(json.loads(line))
        self._process.wait()
        self._note_start(InvalidState("The model cannot be loaded for serving.", code="engine_failed"))
        for stream in list(self._streams.values()):
            stream.put(engine_lost())
        for adapter in list(self._loads):
            self._settle(adapter, engine_lost())
        self._lines.put(None)

    def _hear(self, said: EngineMessage) -> None:
        self.heard_at = time.monotonic()
        match said["kind"]:
            case "stepped":
                pass
            case "ready":
                self._note_start(said)
            case "loaded":
                self._settle(said["adapter"], said["proof"])
            case "refused":
                log.error("an adapter was refused: %s", said["message"])
                self._settle(said["adapter"], NotServed(f"The adapter is not proved: {said['message']}"))
            case _:
                stream = self._streams.get(said["id"])
                if said["kind"] in ("done", "failed", "absent"):
                    with self._lock:
                        self._streams.pop(said["id"], None)
                        self.used_at = time.monotonic()
                if stream:
                    stream.put(said)
