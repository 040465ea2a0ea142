"""A service with one tenant, jobs to do and workers that do them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from threading import Thread
from typing import Any

from pydantic import SecretStr
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from app.audit_log import service as audit_log
from app.db import make_engine, read, transaction
from app.keys import service as keys
from app.models import TERMINAL, File, Job, JobEvent
from app.quotas import service as quotas
from app.settings import Settings
from app.storage import Storage, open_storage
from tests.conftest import Place
from tests.worker.parts import POOL, RECIPE, SUITES, TRAINING, lines, write_key
from worker.main import Worker

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 40.0


def scripted(behaviour: str) -> list[str]:
    """The command of a child that trains nothing."""
    return [sys.executable, "-m", "tests.worker.scripted_child", behaviour]


@dataclass
class Shop:
    """Database, storage and settings with timers that suit tests."""

    folder: Path
    database_url: str
    place: Place
    model: Path
    timers: dict[str, float] = field(
        default_factory=lambda: {"lease_s": 3.0, "heartbeat_s": 0.2, "poll_s": 0.1, "reap_s": 0.2, "stop_grace_s": 10.0}
    )

    def __post_init__(self) -> None:
        self.engine: Engine = make_engine(self.database_url)
        self.storage: Storage = open_storage(self.place.url, self.place.endpoint_url)
        self.signing_key = self.folder.parent / "signing.pem"
        write_key(self.signing_key)
        with transaction(self.engine) as session:
            keys.ensure_first(session, None)
            self.key, _ = keys.create(session, keys.FIRST_TENANT, "test", ["customer", "admin"])

    @property
    def work_dir(self) -> Path:
        return self.folder / "work"

    def settings(self, **changes: Any) -> Settings:
        asked = {
            "data_dir": self.folder,
            "database_url": SecretStr(self.database_url),
            "storage_url": self.place.url,
            "s3_endpoint_url": self.place.endpoint_url,
            "signing_key": self.signing_key,
            "warm_child": False,
            **self.timers,
        }
        return Settings(**{**asked, **changes})

    def add_job(self, *, waived: bool = False, waivers: bool = False, **columns: Any) -> str:
        """A queued job with everything that it names in storage."""
        with transaction(self.engine) as session:
            return submit(session, self.asked(waived=waived, waivers=waivers) | columns)

    def asked(self, *, waived: bool = False, waivers: bool = False) -> dict[str, Any]:
        """The columns of a job, with everything that it names in storage."""
        spec = {
            "model": {"alias": "tiny", "source": str(self.model), "revision": None, "learning_rate": None},
            "training_file": self.put("training", lines(TRAINING)),
            "validation_file": None,
            "pool": self.put("pool", lines(POOL)),
            "suites": [self.put(kind, lines(rows)) | {"name": kind, "kind": kind} for kind, rows in SUITES.items()],
            "policy": {"max_asr": 0.1, "max_asr_rise": 0.1, "max_over_refusal_rise": 0.05, "max_unscored": 0.01}
            | {"waivers": waivers},
            "judge": "refusal",
            "waived": waived,
        }
        return {
            "tenant_id": self.key.tenant_id,
            "key_id": self.key.id,
            "model": "tiny",
            "training_file": "file-1",
            "recipe": asdict(RECIPE),
            "spec": spec,
            "request_hash": "0",
        }

    def put(self, name: str, content: bytes) -> dict[str, Any]:
        self.storage.write(f"inputs/{name}", [content])
        return {"id": name, "storage_key": f"inputs/{name}", "sha256": sha256(content).hexdigest()}

    def job(self, job_id: str) -> Job:
        with read(self.engine) as session:
            return session.get_one(Job, job_id)

    def events(self, job_id: str) -> list[str]:
        with read(self.engine) as session:
            query = select(JobEvent.message).where(JobEvent.job_id == job_id).order_by(JobEvent.seq)
            return list(session.scalars(query))

    def files(self, job: Job) -> list[File]:
        with read(self.engine) as session:
            return [session.get_one(File, file_id) for file_id in job.result_files or []]

    def content(self, key: str) -> bytes:
        return b"".join(self.storage.chunks(key))

    def until_ended(self, job_id: str) -> Job:
        until(lambda: self.job(job_id).status in TERMINAL)
        return self.job(job_id)

    @contextmanager
    def serving(self, behaviour: str, **changes: Any) -> Iterator[Worker]:
        """A worker in this process, its child in another."""
        worker = Worker(self.settings(**changes), scripted(behaviour))
        thread = Thread(target=worker.run)
        thread.start()
        try:
            yield worker
        finally:
            worker.end()
            thread.join()

    def start(self, *command: str, **changes: Any) -> subprocess.Popen[bytes]:
        """A worker as a process of its own; `command` follows `python -m`."""
        settings = self.settings(**changes)
        values = {f"SPARD_{name.upper()}": value for name, value in settings.model_dump(exclude_none=True).items()}
        plain = {n: v.get_secret_value() if isinstance(v, SecretStr) else str(v) for n, v in values.items()}
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        return subprocess.Popen(
            [sys.executable, "-m", *command], cwd=ROOT, env=os.environ | plain | {"PYTHONPATH": path}
        )

    def do(self, behaviour: str, **columns: Any) -> Job:
        """One job from the queue to its end."""
        job_id = self.add_job(**columns)
        with self.serving(behaviour):
            return self.until_ended(job_id)


def submit(session: Session, asked: dict[str, Any]) -> str:
    """A job as the service makes it: within the project's limits, and with its entry in the audit log."""
    quotas.check_job(session, asked["tenant_id"])
    job = Job(**asked)
    session.add(job)
    session.flush()
    audit_log.record(session, "job.created", job.id)
    return job.id


def until(is_so: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    """Wait for a fact."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
