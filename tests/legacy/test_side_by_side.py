"""An upgrade without a stop, from commit 14c5fa6, in the order of docs/compatibility.md: every job ends once.

The old code comes from the repository's own history and runs in the environment of today. SPARD_SOAK=1 sends more jobs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.settings import Settings
from app.signing import signing_key
from tests.legacy import rows
from tests.legacy.installation import unpack
from tests.legacy.running import WAIT_S, good
from tests.servers import free_port

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "14c5fa6"
KEY = "sk-spard-of-the-test-and-long-enough"
JOBS = "/v1/fine_tuning/jobs"
AT_ONCE = 10 if os.environ.get("SPARD_SOAK") else 1  # jobs that each API gets in each step
ASK = {
    "model": "tiny",
    "safety": {"selection": {"min_examples": 8}},
    "hyperparameters": {"n_epochs": 1, "batch_size": 8, "learning_rate_multiplier": 0.2},
}
# What is asked here is who does which job; a tiny model's replies at temperature are no matter of it.
_WIDE = ("MAX_ASR", "MAX_ASR_RISE", "MAX_OVER_REFUSAL_RISE", "MAX_DRESSED_REFUSAL_RISE", "MAX_UNSCORED")
DECIDED = {"SPARD_GATE_ALLOW_UNMEASURED_JUDGE": "true"} | {f"SPARD_GATE_{name}": "1" for name in _WIDE}  # as it was
MIGRATE = "import os; from app.db import upgrade_schema; upgrade_schema(os.environ['SPARD_DATABASE_URL'])"


@dataclass
class Version:
    """One version of the code on settings that both share."""

    code: Path
    environment: dict[str, str]
    log: Path
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", *arguments], cwd="/", env=self.environment, stdout=log, stderr=log
            )
        self.running.append(process)
        return process

    def migrate(self) -> None:
        assert self.start("-c", MIGRATE).wait(WAIT_S) == 0, self.tail()

    def worker(self) -> subprocess.Popen[bytes]:
        return self.start("-m", "worker")

    @contextmanager
    def api(self) -> Iterator[httpx2.Client]:
        """A client of an API of this version; the API ends in order with the block."""
        port = free_port()
        line = ["-m", "uvicorn", "--app-dir", str(self.code), "app.main:checked_app", "--factory", "--port", str(port)]
        process = self.start(*line)
        headers = {"authorization": f"Bearer {KEY}"}
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client:

            def is_ready() -> bool:
                assert process.poll() is None, self.tail()
                with suppress(httpx2.TransportError):
                    return bool(client.get("/readyz").status_code == 200)
                return False

            self.wait_until(is_ready)
            yield client
        stop(process)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_so():
            assert time.monotonic() < deadline, f"waited in vain\n{self.tail()}"
            time.sleep(0.5)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


@pytest.fixture
def versions(empty_postgres_url: str, tmp_path: Path) -> Iterator[tuple[Version, Version]]:
    with open_versions(COMMIT, empty_postgres_url, tmp_path) as found:
        yield found


# An installation of an old version has no distribution of the laboratory, whose judges that version ships itself.
_WITHOUT_LABORATORY = """
from importlib import metadata

found_by = metadata.entry_points

def entry_points(**about):
    found = found_by(**about)
    if not about.get("group", "").startswith("spard."):
        return found  # without a group it is another type, which fsspec reads
    return metadata.EntryPoints(each for each in found if not each.value.startswith("spard_lab."))

metadata.entry_points = entry_points
"""


@contextmanager
def open_versions(
    commit: str, database_url: str, tmp_path: Path, settings: Mapping[str, str] | None = None
) -> Iterator[tuple[Version, Version]]:
    """The version of a commit and the new one, on one database and one storage; `settings` are of both."""
    signing_key(Settings(data_dir=tmp_path))  # makes one
    shared = {
        "SPARD_DATABASE_URL": database_url,
        "SPARD_STORAGE_URL": f"file://{tmp_path / 'objects'}",
        "SPARD_SIGNING_KEY": str(tmp_path / "signing_key.pem"),
        "SPARD_ADMIN_KEY": KEY,
        "SPARD_DEVICE": "cpu",
        "SPARD_POLL_S": "0.1",
        "SPARD_WARM_CHILD": "false",
        "OMP_NUM_THREADS": "1",
        **(settings or {}),
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SPARD_")}
    old = tmp_path / commit
    old.mkdir()
    _checkout(commit, old)
    with (old / "spard" / "__init__.py").open("a") as program:  # every process imports it, also inside the sandbox
        program.write(_WITHOUT_LABORATORY)
    found = []
    for code, chosen in ((old, {}), (ROOT, DECIDED)):
        own = chosen | {"SPARD_DATA_DIR": str(tmp_path / f"data-{code.name}"), "PYTHONPATH": str(code)}
        found.append(Version(code, inherited | shared | own, tmp_path / f"log-{code.name}"))
    yield found[0], found[1]
    for process in found[0].running + found[1].running:
        process.kill()
        process.wait()


def _checkout(commit: str, folder: Path) -> None:
    archive = ["git", "-C", str(ROOT), "archive", commit, "app", "worker", "spard", "migrations"]
    packed = subprocess.run(archive, capture_output=True, check=False)
    if packed.returncode:
        pytest.skip(f"this copy of the repository has no commit {commit}")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    process.wait(WAIT_S)


def provide(client: httpx2.Client, model: Path) -> str:
    """What a provider offers, and a training file."""
    good(client.post("/v1/admin/models", json={"alias": "tiny", "source": str(model), "learning_rate": 0.0005}))
    good(client.post("/v1/admin/pools?name=general", files={"file": ("pool.jsonl", rows.pool())}))
    good(client.post("/v1/admin/suites?name=h&kind=harmful", files={"file": ("h.jsonl", rows.harmful())}))
    training = {"file": ("train.jsonl", rows.training())}
    file_id: str = good(client.post("/v1/files", data={"purpose": "fine-tune"}, files=training))["id"]
    return file_id


def create(client: httpx2.Client, file_id: str) -> list[str]:
    return [good(client.post(JOBS, json=ASK | {"training_file": file_id}))["id"] for _ in range(AT_ONCE)]


def ended_jobs(client: httpx2.Client, jobs: list[str]) -> list[Any]:
    found = [good(client.get(f"{JOBS}/{job}")) for job in jobs]
    return [job for job in found if job["status"] in ("succeeded", "failed", "cancelled")]


def test_an_upgrade_of_workers_and_then_of_the_api_loses_no_job(
    versions: tuple[Version, Version], tmp_path: Path
) -> None:
    old, new = versions
    model = unpack(tmp_path / "fixture", "sqlite").model
    old.migrate()
    with old.api() as before:
        file_id = provide(before, model)
        worker = old.worker()
        jobs = create(before, file_id)
        old.wait_until(lambda: good(before.get(f"{JOBS}/{jobs[0]}"))["status"] == "running")
        new.migrate()  # under the old ones that serve
        new.worker()
        jobs += create(before, file_id)
        stop(worker)  # it hands back what it was at
        with new.api() as after:
            jobs += create(before, file_id) + create(after, file_id)
            new.wait_until(lambda: len(ended_jobs(after, jobs)) == len(jobs))
            found = ended_jobs(after, jobs)
            assert Counter(job["status"] for job in found) == {"succeeded": len(jobs)}, (found, new.tail())
            assert len({job["fine_tuned_model"] for job in found}) == len(jobs)
            read = [(each["id"], each["status"]) for each in good(before.get(JOBS, params={"limit": 100}))["data"]]
            assert sorted(read) == sorted((job, "succeeded") for job in jobs)
            for job in jobs:
                messages = [each["message"] for each in good(after.get(f"{JOBS}/{job}/events?limit=1000"))["data"]]
                assert sum("completed" in message or "succeeded" in message for message in messages) <= 1
                assert good_bytes(before, job) == good_bytes(after, job)


def good_bytes(client: httpx2.Client, job: str) -> bytes:
    answer = client.get(f"{JOBS}/{job}/adapter", follow_redirects=True)
    assert answer.is_success, answer.text
    content: bytes = answer.content
    return content
