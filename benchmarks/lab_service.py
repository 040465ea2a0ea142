"""Start `spard up` from a checkout with the small lab's model, pool and suites, for benchmarks that run whole jobs."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from openai import OpenAI

from benchmarks.service import wait_until_ready
from examples import demo

KEY = "sk-spard-benchmark-key-for-this-machine-only"
MODEL = "lab"
SUITES = {"heldout_harmful": "harmful", "benign": "benign", "utility_test": "utility"}
ENDED = ("succeeded", "failed", "cancelled")
_START = "from spard.commands import main; main()"
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class LabService:
    """A running service that offers the lab's base model under the name `lab`."""

    url: str
    process: psutil.Process
    data: Path

    @property
    def client(self) -> OpenAI:
        """Return a new OpenAI client with the service's key."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=2)

    def cpu_s(self) -> float:
        """Return the CPU seconds of the service and of all its descendants, ended ones included."""
        total = 0.0
        for each in (self.process, *self.process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def took_s(self, job_id: str) -> float:
        """Return the seconds from a job's start to its end."""
        return float(self._of_row(job_id, "(julianday(finished_at) - julianday(started_at)) * 86400"))

    def costs(self, job_id: str) -> dict[str, dict[str, float]]:
        """Return the cost (`units` and `seconds`) of each stage from the job's row in the database."""
        found: dict[str, dict[str, float]] = json.loads(self._of_row(job_id, "stage_costs") or "{}")
        return found

    def _of_row(self, job_id: str, column: str) -> Any:
        with closing(sqlite3.connect(f"file:{self.data}/spard.db?mode=ro", uri=True)) as database:
            return database.execute(f"select {column} from jobs where id = ?", (job_id,)).fetchone()[0]  # noqa: S608

    def upload(self, lines: Sequence[bytes]) -> str:
        """Upload a training file and return its id once it is processed."""
        client = self.client
        file = client.files.create(file=("train.jsonl", b"".join(lines)), purpose="fine-tune")
        return client.files.wait_for_processing(file.id, poll_interval=_LOOK_S).id

    def run(self, ask: Mapping[str, Any]) -> dict[str, Any]:
        """Create a job, wait until it has ended, and return it."""
        jobs = self.client.fine_tuning.jobs
        job_id = self.client.post("/fine_tuning/jobs", cast_to=dict[str, Any], body=dict(ask))["id"]
        while (job := jobs.retrieve(job_id)).status not in ENDED:
            time.sleep(_LOOK_S)
        return job.model_dump()


@contextmanager
def lab_service(lab: Path, checkout: Path | None = None) -> Iterator[LabService]:
    """Run the service of a checkout with its `.venv` (default: this checkout), with the lab's data imported."""
    with socket.socket() as found, tempfile.TemporaryDirectory(prefix="spard-lab-service-") as folder:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
        found.close()
        python = str(checkout / ".venv" / "bin" / "python") if checkout else sys.executable
        url = f"http://127.0.0.1:{port}"
        environment = os.environ | {"SPARD_ADMIN_KEY": KEY, "SPARD_API_KEY": KEY, "SPARD_BASE_URL": url}
        up = [python, "-c", _START, "up", "--data", f"{folder}/data", "--port", str(port)]
        place = str(checkout or Path.cwd())
        with (Path(folder) / "log").open("wb") as log:
            process = subprocess.Popen(
                up, env=environment, cwd=place, stdout=log, stderr=log, preexec_fn=demo.stop_with_us
            )
        try:
            wait_until_ready(url, process, Path(folder) / "log")
            for words in _offers(lab):
                command = [python, "-c", _START, *words]
                subprocess.run(command, env=environment, cwd=place, check=True, stdout=subprocess.DEVNULL)
            yield LabService(url, psutil.Process(process.pid), Path(folder) / "data")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)


def _offers(lab: Path) -> Iterator[list[str]]:
    yield ["models", "add", MODEL, str(lab / "model")]
    yield ["pool", "import", str(lab / "pool_two_sided.jsonl"), "--name", "safe"]
    for name, kind in SUITES.items():
        yield ["suites", "import", str(lab / f"{name}.jsonl"), "--name", name, "--kind", kind]
