"""An API and workers of one service, each in a process of its own that is hurt, and started again when it has ended."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx2
import psutil
from sqlalchemy import select

from app.db import read
from app.db.tables import Job, JobStatus
from tests.faults import api_process, worker_process
from tests.faults.processes import context
from tests.servers import free_port
from tests.worker.shop import Shop, variables

_LOOK_S, _END_S = 2.0, 20.0
_RESCUED = "spard_jobs_rescued_total "


@dataclass
class Deployment:
    """`settings` are those of all processes where they differ from the shop's; `environment` is theirs too."""

    shop: Shop
    size: int  # workers
    settings: dict[str, Any]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._context = context()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.workers: dict[int, BaseProcess] = {}
        self._ports: dict[int, int] = {}
        self._rescued = Counter[int]()
        self.frozen: set[int] = set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run inside the block; at its end no process is left."""
        self._api = self._start_api()
        try:
            self.revive()
            yield
        finally:
            for process in (*self.workers.values(), self._api):
                self.thaw(process.pid or 0)
                process.terminate()
            for process in (*self.workers.values(), self._api):
                process.join(_END_S)
                process.kill()
                process.join()
            self._listener.close()

    def revive(self) -> None:
        """Start anew what has ended, as a supervisor does."""
        for pid in [pid for pid, process in self.workers.items() if not process.is_alive()]:
            self.workers.pop(pid).join()
            self.frozen.discard(pid)
        while len(self.workers) < self.size:
            port = free_port()
            settings = self.shop.settings(**self.settings, metrics_port=port)
            arguments = (self.folder, dict(self.environment) | variables(settings))
            process = self._context.Process(target=worker_process.serve, args=arguments)
            process.start()
            self.workers[process.pid or 0], self._ports[process.pid or 0] = process, port
        if not self._api.is_alive():
            self._api.join()
            self._api = self._start_api()

    def restart_workers(self, **settings: Any) -> None:
        """Let all workers stop in order, and start others with other settings."""
        self.settings |= settings
        for pid, process in self.workers.items():
            self.thaw(pid)
            process.terminate()
        for process in self.workers.values():
            process.join(_END_S)
            process.kill()
        self.revive()

    def count_rescued(self) -> int:
        """Sum `spard_jobs_rescued_total` over all workers that there were, each as it was last seen."""
        for pid in self.workers.keys() - self.frozen:
            with suppress(httpx2.HTTPError):
                lines = httpx2.get(self._metrics_url(pid), timeout=_LOOK_S).text.splitlines()
                self._rescued[pid] = sum(int(float(line.split()[-1])) for line in lines if line.startswith(_RESCUED))
        return self._rescued.total()

    def busy(self) -> list[int]:
        """Return the numbers of the processes that hold a job and are not frozen."""
        with read(self.shop.engine) as session:
            owners = session.scalars(select(Job.lease_owner).where(Job.status == JobStatus.running)).all()
        pids = {int((owner or ":0").rpartition(":")[2]) for owner in owners}
        return sorted((pids & self.workers.keys()) - self.frozen)

    def kill(self, pid: int) -> None:
        """End a worker without a word."""
        self.workers[pid].kill()
        self.workers[pid].join()

    def kill_child(self, pid: int) -> bool:
        """End the training process of a worker; whether there was one."""
        children = self._machine(pid)[1:]
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        return bool(children)

    def freeze(self, pid: int, *, whole: bool) -> None:
        """Stop a worker; with its children if it is the `whole` machine that stops."""
        self.frozen.add(pid)
        for process in self._machine(pid)[: None if whole else 1]:
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def thaw(self, pid: int) -> None:
        """Let what is frozen go on."""
        self.frozen.discard(pid)
        for process in self._machine(pid):
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def kill_api(self) -> None:
        """End the API without a word, and start another on the same socket."""
        self._api.kill()
        self._api.join()
        self.revive()

    def _machine(self, pid: int) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        return []

    def _metrics_url(self, pid: int) -> str:
        return f"http://127.0.0.1:{self._ports[pid]}/metrics"

    def _start_api(self) -> BaseProcess:
        values = self.shop.settings(**self.settings).model_dump()
        arguments = (values, self._listener, self.folder, dict(self.environment))
        process = self._context.Process(target=api_process.serve_in_storm, args=arguments)
        process.start()
        return process
