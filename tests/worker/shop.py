"""A service with one project, jobs to do and workers that do them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from threading import Thread
from typing import Any

from pydantic import SecretStr
from sqlalchemy import Engine, select, update
from sqlalchemy.orm import Session

from app import audit_log, keys, quotas
from app.db import make_engine, read, transaction
from app.db.tables import TERMINAL, File, Job, JobEvent, JobStatus
from app.db.tables.job_spec import VERSION, CorpusRef, JobSpec, ModelRef, ObjectRef, PolicyRef
from app.settings import Settings
from app.storage import Storage, open_storage
from spard.config import JudgeSpec
from tests.place import Place
from tests.worker.parts import POOL, RECIPE, SUITES, TRAINING, lines, write_key
from worker.worker import Worker

ROOT = Path(__file__).resolve().parents[2]
# For whatever a machine with other work needs; what comes is not waited for. A soak's outages alone last minutes.
WAIT_S = 3600.0 if os.environ.get("SPARD_SOAK") == "1" else 600.0


def scripted_command(behavior: str) -> list[str]:
    """The command of a child that trains nothing."""
    return [sys.executable, "-m", "tests.worker.scripted_child", behavior]


@dataclass
class Shop:
    """Database, storage and settings with timers that suit tests."""

    folder: Path
    database_url: str
    place: Place
    model: Path
    timers: dict[str, float] = field(
        default_factory=lambda: {
            "lease_s": 60.0,
            "heartbeat_s": 0.2,
            "poll_s": 0.1,
            "reap_s": 0.2,
            "stop_grace_s": 60.0,
            "killed_wait_s": 0.1,
        }
    )

    def __post_init__(self) -> None:
        self.engine: Engine = make_engine(self.database_url)
        self.storage: Storage = open_storage(self.place.url, self.place.endpoint_url)
        self.signing_key = self.folder.parent / "signing.pem"
        write_key(self.signing_key)
        with transaction(self.engine) as session:
            keys.ensure_first(session, None)
            self.key, _ = keys.create(session, keys.FIRST_PROJECT, "test", ["customer", "admin"])

    def is_slow(self) -> bool:
        """Whether a slow child has come to its wait."""
        return any(self.work_dir.glob("*/is_slow"))

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

    def add_job(
        self, *, waived: bool = False, waivers: bool = False, checkpoints: int | None = None, **columns: Any
    ) -> str:
        """A queued job with everything that it names in storage."""
        with transaction(self.engine) as session:
            return submit(session, self.job_columns(waived=waived, waivers=waivers, checkpoints=checkpoints) | columns)

    def job_columns(
        self, *, waived: bool = False, waivers: bool = False, checkpoints: int | None = None
    ) -> dict[str, Any]:
        """The columns of a job, with everything that it names in storage."""
        spec = JobSpec(
            version=VERSION,
            model=ModelRef(alias="tiny", source=str(self.model)),
            training_file=self.put("training", lines(TRAINING)),
            pool=self.put_corpus("pool", "pool", lines(POOL)),
            suites=tuple(self.put_corpus(kind, kind, lines(rows)) for kind, rows in SUITES.items()),
            policy=PolicyRef(waivers=waivers),
            judge="refusal",
            judge_spec=JudgeSpec(),
            waived=waived,
            checkpoint_prompts=checkpoints,
        )
        return {
            "project_id": self.key.project_id,
            "key_id": self.key.id,
            "model": "tiny",
            "training_file": "file-1",
            "recipe": asdict(RECIPE),
            "spec": spec,
            "request_hash": "0",
        }

    def put(self, name: str, content: bytes) -> ObjectRef:
        """A customer's file in storage."""
        self.storage.write(f"inputs/{name}", [content])
        return ObjectRef(id=name, storage_key=f"inputs/{name}", sha256=sha256(content).hexdigest())

    def put_corpus(self, name: str, kind: str, content: bytes) -> CorpusRef:
        """A pool or a suite in storage."""
        at = self.put(name, content)
        rows = content.count(b"\n")
        return CorpusRef(
            id=name, kind=kind, name=name, version=1, storage_key=at.storage_key, sha256=at.sha256, rows=rows
        )

    def job(self, job_id: str) -> Job:
        with read(self.engine) as session:
            return session.get_one(Job, job_id)

    def expire_lease(self, job_id: str) -> None:
        """As if whoever holds the job had not been heard of for too long."""
        with transaction(self.engine) as session:
            session.execute(update(Job).where(Job.id == job_id).values(lease_expires_at=0.0))

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
        wait_until(lambda: self.job(job_id).status in TERMINAL)
        return self.job(job_id)

    @contextmanager
    def serving(self, behavior: str, **changes: Any) -> Iterator[Worker]:
        """A worker in this process, its child in another."""
        with at_work(Worker(self.settings(**changes), scripted_command(behavior))) as worker:
            yield worker

    def start(self, *command: str, under: Sequence[str] = (), **changes: Any) -> subprocess.Popen[bytes]:
        """A worker as a process of its own; `command` follows `python -m`, and all of it follows `under`."""
        environment = os.environ | variables(self.settings(**changes))
        return subprocess.Popen([*under, sys.executable, "-m", *command], cwd=ROOT, env=environment)

    def do(self, behavior: str, **columns: Any) -> Job:
        """One job from the queue to its end."""
        job_id = self.add_job(**columns)
        with self.serving(behavior):
            return self.until_ended(job_id)


def variables(settings: Settings) -> dict[str, str]:
    """Return the environment variables of settings."""
    values = settings.model_dump(exclude_none=True, exclude={"audit_engine", "judge", "gate"})
    plain = {name: each.get_secret_value() if isinstance(each, SecretStr) else each for name, each in values.items()}
    return {f"SPARD_{name.upper()}": str(each) for name, each in plain.items()}


@contextmanager
def at_work(worker: Worker, name: str | None = None) -> Iterator[Worker]:
    """Run a worker in a thread of this process, and end it with the block, however that ends."""
    thread = Thread(target=worker.run, name=name)
    thread.start()
    try:
        yield worker
    finally:
        worker.end()
        thread.join()


def submit(session: Session, asked: dict[str, Any]) -> str:
    """A job as the service makes it: within the project's limits, and with its entry in the audit log."""
    quotas.check_job(session, asked["project_id"])
    job = Job(**asked)
    session.add(job)
    session.flush()
    audit_log.record(session, "job.created", job.id)
    return job.id


def wait_until(is_so: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    """Wait for a fact."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def forget_waits(shop: Shop) -> None:
    """As if the minutes that jobs wait for had passed."""
    with transaction(shop.engine) as session:
        session.execute(update(Job).where(Job.status == JobStatus.queued).values(run_after=0.0))
