"""`spard up` as an operator runs it: a process, its log, and HTTP clients. Nothing of the service is imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil

from tests.servers import free_port

SPARD = str(Path(sys.executable).with_name("spard"))  # the command as it is installed
WAIT_S = 600.0
_TIMERS = {"SPARD_POLL_S": "0.1", "SPARD_HEARTBEAT_S": "0.5", "SPARD_LEASE_S": "10", "SPARD_REAP_S": "0.5"}


@dataclass(frozen=True)
class Home:
    """A data folder, and what else its settings name."""

    folder: Path
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def environment(self) -> dict[str, str]:
        """Nothing of the caller's settings, and those of this home."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SPARD_")}
        fixed = {"SPARD_DATA_DIR": str(self.data), "SPARD_WEBHOOKS_TO_LOOPBACK": "true", "SPARD_DEVICE": "cpu"}
        return inherited | fixed | _TIMERS | {"OMP_NUM_THREADS": "1"} | dict(self.settings)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of `spard` to its end."""
        return subprocess.run(
            [SPARD, *arguments], cwd=self.folder, env=self.environment(), capture_output=True, text=True, check=False
        )

    @contextmanager
    def serving(self, *, worker: bool, **settings: str) -> Iterator[Running]:
        """`spard up` on a free port; stopped in order at the end."""
        port = free_port()
        option = "--worker" if worker else "--no-worker"
        with (self.folder / "service.log").open("ab") as log:
            process = subprocess.Popen(
                [SPARD, "up", "--data", str(self.data), "--port", str(port), option],
                cwd=self.folder,
                env=self.environment() | settings,
                stdout=log,
                stderr=log,
            )
        running = Running(process, f"http://127.0.0.1:{port}", self.folder / "service.log")
        try:
            running.await_ready()
            yield running
        finally:
            running.close()
            process.send_signal(signal.SIGTERM)
            process.wait(120)


@dataclass
class Running:
    """A service that answers."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    _clients: dict[str, httpx2.Client] = field(default_factory=dict)

    def client(self, secret: str) -> httpx2.Client:
        """A client with this key; the same again for the same key."""
        if secret not in self._clients:
            headers = {"authorization": f"Bearer {secret}"}
            self._clients[secret] = httpx2.Client(base_url=self.url, headers=headers, timeout=60)
        return self._clients[secret]

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def await_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.tail()
            with suppress(httpx2.TransportError):
                return bool(httpx2.get(f"{self.url}/readyz").status_code == 200)
            return False

        self.wait_until(is_ready)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait for a fact; the service's log is shown when it does not become one."""
        deadline = time.monotonic() + WAIT_S
        while not is_so():
            assert time.monotonic() < deadline, f"waited in vain\n{self.tail()}"
            time.sleep(0.1)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def kill(self) -> None:
        """End the service and all that it started without a warning, as a power cut does."""
        os.kill(self.process.pid, signal.SIGSTOP)  # it starts no other worker meanwhile
        others = psutil.Process(self.process.pid).children(recursive=True)
        for process in [*others, psutil.Process(self.process.pid)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        psutil.wait_procs(others, timeout=30)


def good(answer: httpx2.Response) -> Any:
    """The JSON of an answer that is no error."""
    assert answer.is_success, f"{answer.request.method} {answer.request.url}: {answer.status_code} {answer.text}"
    return answer.json()
