"""A live service with one finished job, and an environment for each major of the official client."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr
from sqlalchemy import update

from app import db
from app.checkpoints import records
from app.db.base import new_id
from app.db.tables import File, Job, JobStatus
from app.db.tables.job_records import Adapter, SafetySummary
from app.jobs import lease
from app.jobs.lease import Publication
from app.jobs.project_models import fine_tuned_model
from app.main import create_app
from app.settings import Settings
from app.storage import Storage
from tests import environments
from tests.app.http.conftest import FILES, JOBS, Service, offer, rows, serve_app
from tests.app.parts import epoch_end

CLIENTS = {1: "1.109.1", 2: "2.54.0", 3: "3.52.0"}
_CSV = b"step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy\n1,0.5,0.5,,\n"


@pytest.fixture(scope="module")
def live(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, str]]:
    """The application behind a real server; a customer has a job that has succeeded."""
    folder = tmp_path_factory.mktemp("live")
    shutil.copy(sqlite_template, folder / "spard.db")
    database = SecretStr(f"sqlite:///{folder / 'spard.db'}")
    app = create_app(Settings(data_dir=folder, database_url=database, webhooks_to_loopback=True))
    with TestClient(app) as http:
        service = Service(app, http)
        offer(service.client("org-provider", "admin", "customer"), folder / "model")
        with serve_app(app) as url:
            yield service, url


@pytest.fixture(scope="module", params=CLIENTS)
def outcome(request: pytest.FixtureRequest, live: tuple[Service, str]) -> dict[str, Any]:
    """What the client of one major found, check by check."""
    service, url = live
    python = environment(f"openai-{request.param}", f"openai=={CLIENTS[request.param]}")
    finish_a_job(service)
    keys = [service.add_key("org-customer", *scopes) for scopes in (["customer"], ["admin", "customer"])]
    script = Path(__file__).with_name("client.py")
    done = subprocess.run([python, "-I", script, url, *keys], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["version"] == CLIENTS[request.param]
    checks: dict[str, Any] = found["checks"]
    return checks


def environment(name: str, requirement: str) -> Path:
    """The Python of an environment of its own; the test is skipped where it cannot be had."""
    try:
        return environments.python(name, requirement)
    except environments.NotInstalled as error:
        pytest.skip(str(error))


def _archive(storage: Storage, step: int) -> Adapter:
    key = f"epochs/step-{step:06d}/adapter.tar.gz"
    stored = storage.write(key, [b"an archive"])
    return {"storage_key": key, "sha256": stored.sha256, "bytes": stored.bytes}


def finish_a_job(service: Service) -> str:
    """End a job as a worker would, with checkpoints and results; its id."""
    customer, storage = service.client("org-customer", "customer"), service.app.state.storage
    file = customer.post(FILES, data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", rows(10))}).json()
    job_id = customer.post(JOBS, json={"model": "lab/tiny-1", "training_file": file["id"]}).json()["id"]
    with db.transaction(service.app.state.engine) as session:
        others = (Job.status == JobStatus.queued) & (Job.id != job_id)
        session.execute(update(Job).where(others).values(status=JobStatus.cancelled))
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        ends = {step: epoch_end(step / 10, "pass", _archive(storage, step)) for step in (5, 10, 15)}
        assert records.record(session, claim, ends)
        key = f"tenants/org-customer/jobs/{job_id}/a1/out"
        stored = storage.write(f"{key}/metrics.csv", [_CSV])
        facts = {"purpose": "fine-tune-results", "status": "processed", "filename": "step_metrics.csv"}
        csv = File(id=new_id("file-"), project_id="org-customer", storage_key=f"{key}/metrics.csv", **facts)
        csv.bytes, csv.sha256 = stored.bytes, stored.sha256
        session.add(csv)
        stored = storage.write(f"{key}/adapter.tar.gz", [b"an archive"])
        adapter: Adapter = {"storage_key": f"{key}/adapter.tar.gz", "sha256": stored.sha256, "bytes": stored.bytes}
        model = fine_tuned_model(session.get_one(Job, job_id))
        storage.write(f"{key}/safety.json", [b'{"gate": {"decision": "pass", "reasons": []}}'])
        safety: SafetySummary = {"gate": {"decision": "pass", "reasons": []}}
        assert lease.publish(session, claim, Publication(model, 10, [csv.id], adapter, safety, f"{key}/safety.json"))
    return str(job_id)
