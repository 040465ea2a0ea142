"""A service with a real base model, adapters that were released, held or waived, and a client that asks them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import uvicorn
from fastapi import FastAPI
from openai import AsyncOpenAI, OpenAI
from pydantic import SecretStr

from app import db, keys
from app.catalog import service as catalog
from app.db import upgrade_schema
from app.db.base import utc_now
from app.db.tables import ApiKey, BaseModelEntry, Job, JobCheckpoint, JobStatus, Project
from app.db.tables.job_spec import JobSpec, ModelRef, ObjectRef, PolicyRef
from app.db.tables.jobs import EPOCH
from app.http.connections import BoundedHttp
from app.jobs import project_models
from app.jobs.project_models import fine_tuned_model
from app.main import create_app
from app.settings import Settings
from app.signing import signing_key
from spard.config import Lora, Recipe
from spard.config.run_spec import to_mapping
from spard.digests import file_sha256
from spard.models.adapters import save_adapter
from spard.models.base import load_base
from spard.models.lora import trainable_model
from spard.release.archive import archive
from spard.release.manifest import sign
from tests.spard.parts import write_model

RECIPE = Recipe(lora=Lora(rank=4))
ENDS_S = 300.0  # in which a server ends, on whatever machine
LIMITS: Any = {"serving_adapters_mb": 0.03}  # two adapters at once: others are loaded anew all the time
PASSED: Any = {"gate": {"decision": "pass", "reasons": []}}


def make_adapter(
    model: Path, folder: Path, seed: int, facts: dict[str, Any] | None = None, recipe: Recipe = RECIPE
) -> Path:
    """An adapter that was not trained, and changes what the model says."""
    base = load_base(model, device="cpu", quantization=recipe.quantization)
    tuned = trainable_model(base.model, recipe)
    generator = torch.Generator().manual_seed(seed)
    for name, weights in tuned.named_parameters():
        if "lora_B" in name:
            weights.data = 0.2 * torch.randn(weights.shape, generator=generator)
    save_adapter(tuned, base, "tiny", folder, facts)
    return folder


@dataclass
class Lab:
    """The application behind a real server, its provider's files, and how many jobs it has."""

    app: FastAPI
    settings: Settings
    url: str
    home: Path
    model: Path
    recipe: Recipe = RECIPE
    keys: dict[str, str] = field(default_factory=dict)
    clients: list[OpenAI] = field(default_factory=list)
    made: int = 0

    def key(self, project: str = "org-customer", *scopes: str) -> str:
        """A key of a project, made once."""
        name = f"{project} {scopes}"
        if name not in self.keys:
            with db.transaction(self.app.state.engine) as session:
                if session.get(Project, project) is None:
                    session.add(Project(id=project, name=project))
                    session.flush()
                self.keys[name] = keys.create(session, project, "test", list(scopes or ("customer",)))[1]
        return self.keys[name]

    def client(self, project: str = "org-customer", *scopes: str) -> OpenAI:
        self.clients.append(OpenAI(base_url=self.url, api_key=self.key(project, *scopes), max_retries=0))
        return self.clients[-1]

    def release(self, seed: int, project: str = "org-customer", **columns: Any) -> str:
        """Publish an adapter as a job of the project's; returns its name."""
        self.key(project)
        self.made += 1
        job_id = f"ftjob-{self.made:012x}{'0' * 12}"
        spec = JobSpec(
            model=ModelRef(alias="tiny", source=str(self.model)),
            training_file=ObjectRef(id="file-1", sha256="0", storage_key="files/1"),
            policy=PolicyRef(),
            judge="refusal",
        )
        with db.transaction(self.app.state.engine) as session:
            key = session.query(ApiKey).filter_by(project_id=project).first()
            assert key
            job = Job(id=job_id, project_id=project, key_id=key.id, model="tiny", training_file="file-1", spec=spec)
            job.recipe, job.request_hash = to_mapping(self.recipe), "0"
            self.publish(job, seed)
            for name, value in columns.items():
                setattr(job, name, value)
            session.add(job)
            return fine_tuned_model(job)

    def publish(self, job: Job, seed: int) -> None:
        """Give a job an adapter and let it have succeeded."""
        folder = make_adapter(self.model, self.home / job.id, seed, {"job_id": job.id}, self.recipe)
        sign(folder, signing_key(self.settings))
        packed = self.home / f"{job.id}.tar.gz"
        archive(folder, packed, f"{job.id}-adapter")
        key = f"tenants/{job.project_id}/jobs/{job.id}/a1/adapter.tar.gz"
        stored = self.app.state.storage.upload_file(key, packed)
        job.adapter = {"storage_key": key, "sha256": stored.sha256, "bytes": stored.bytes}
        job.safety, job.fine_tuned_model, job.status = PASSED, fine_tuned_model(job), JobStatus.succeeded
        job.finished_at = utc_now()

    def adapter_folder(self, model: str) -> Path:
        """Return where the adapter of a model lies unpacked."""
        return next(
            each for each in self.home.glob("ftjob-*") if each.is_dir() and model.rpartition(":")[2] in each.name
        )

    def release_checkpoint(self, seed: int, project: str, decision: str) -> str:
        """An epoch of a job that failed, with its own audit; returns its name."""
        name = self.release(seed, project, status=JobStatus.failed, fine_tuned_model=None, adapter=None, safety=None)
        with db.transaction(self.app.state.engine) as session:
            job = session.query(Job).filter(Job.id.startswith(f"ftjob-{name.rpartition(':')[2]}")).one()
            key = f"tenants/{project}/jobs/{job.id}/a1/adapter.tar.gz"
            row = JobCheckpoint(job_id=job.id, step=10, kind=EPOCH, metrics={}, storage_key=key)
            safety: Any = {"gate": {"decision": decision, "reasons": []}}
            row.safety = safety
            row.sha256, row.bytes = file_sha256(self.home / f"{job.id}.tar.gz"), 1
            session.add(row)
        return f"{name}:ckpt-step-10"


class Clock:
    """The database's clock, by which waivers end, as far ahead of the real one as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = timedelta(0)
        clocks = {"now": lambda: db.now() + self.ahead.total_seconds(), "clock": lambda _: self.now()}
        for module in (catalog, project_models):
            monkeypatch.setattr(module, "db", SimpleNamespace(**vars(db) | clocks))

    def now(self) -> datetime:
        return utc_now() + self.ahead

    def waiver(self, hours: float) -> Any:
        """The summary of a job that a waiver has released until then."""
        until = int((self.now() + timedelta(hours=hours)).timestamp())
        return {"gate": {"decision": "waived", "reasons": []}, "waiver": {"expires_at": until}}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def opened_clients(monkeypatch: pytest.MonkeyPatch) -> list[AsyncOpenAI]:
    """The clients of other servers that the service opens from now on."""
    found: list[AsyncOpenAI] = []

    class Noted(AsyncOpenAI):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            found.append(self)

    monkeypatch.setattr("openai.AsyncOpenAI", Noted)
    return found


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("served") / "tiny")


@contextmanager
def serve_lab(home: Path, model: Path, **limits: Any) -> Iterator[Lab]:
    """The service on a database and a storage below `home`, with one base model, behind a real server."""
    url = f"sqlite:///{home / 'spard.db'}"
    (home / "data").mkdir(parents=True)
    upgrade_schema(url)
    one: Any = {"serving_reserve_mb": 0, "worker_threads": 1, **limits}
    settings = Settings(data_dir=home / "data", database_url=SecretStr(url), **one)
    app = create_app(settings)
    with db.transaction(app.state.engine) as session:
        session.add(BaseModelEntry(alias="tiny", source=str(model)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, http=BoundedHttp, log_config=None, timeout_graceful_shutdown=5))
        thread = Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        lab = Lab(app, settings, f"http://127.0.0.1:{listener.getsockname()[1]}/v1", home, model)
        try:
            yield lab
        finally:
            for client in lab.clients:  # the connection of a second thread would stay open
                client.close()
            server.should_exit = True
            thread.join(ENDS_S)
            assert not thread.is_alive(), "the server does not end"


@pytest.fixture(scope="session")
def served_lab(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Lab]:
    with serve_lab(tmp_path_factory.mktemp("serving"), tiny_model, **LIMITS) as lab:
        yield lab
