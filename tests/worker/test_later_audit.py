"""A job that audits a released model alone: the weights of its archive, under a job's lease, trained by nobody."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from sqlalchemy.orm import Session

from app.db import read, transaction
from app.db.tables import Corpus, File, Job, JobStatus, LaterAudit
from app.jobs import later_audits, lease
from app.jobs.lease import Claim
from app.signing import signing_key
from spard.config import Audit
from spard.release.version import AUDIT_VERSION
from tests.worker.heard import Heard, Work
from tests.worker.parts import SUITES, lines
from tests.worker.shop import Shop
from worker.inputs import fill
from worker.results import pack, upload
from worker.workdir import Folder, new_folder


def publish(shop: Shop, folder: Folder, packed: Path, **columns: Any) -> str:
    """Release a folder's adapter as a job of the shop's, by an older audit, with suites to ask today."""
    pack(folder.adapter, packed, signing_key(shop.settings()), "ftjob-1-adapter")
    stored = shop.storage.upload_file("tenants/x/jobs/y/a1/adapter.tar.gz", packed)
    adapter = {"storage_key": "tenants/x/jobs/y/a1/adapter.tar.gz", "sha256": stored.sha256, "bytes": stored.bytes}
    passed = {"gate": {"decision": "pass"}}
    job_id = shop.add_job(
        status=JobStatus.succeeded, adapter=adapter, fine_tuned_model="ft:1", safety=passed, **columns
    )
    spec = shop.job(job_id).spec
    with transaction(shop.engine) as session:
        names = {"project_id": shop.key.project_id, "filename": "t", "purpose": "fine-tune", "status": "processed"}
        at = spec.training_file
        session.add(File(id=at.id, bytes=1, sha256=at.sha256, storage_key=at.storage_key, **names))
        for kind, rows in SUITES.items():
            at_suite = shop.put_corpus(kind, kind, lines(rows))
            facts = {name: getattr(at_suite, name) for name in ("id", "kind", "name", "version", "sha256", "rows")}
            session.add(Corpus(storage_key=at_suite.storage_key, bytes=1, **facts))
    return job_id


@pytest.fixture
def released_job(light_shop: Shop, finished_job: tuple[Folder, Heard], tmp_path: Path) -> str:
    """A job whose adapter an older audit has released, and a provider with suites."""
    return publish(light_shop, finished_job[0], tmp_path / "adapter.tar.gz")


@pytest.fixture
def requested_audit(light_shop: Shop, released_job: str, monkeypatch: pytest.MonkeyPatch) -> LaterAudit:
    """The audit, with answers of few tokens: the model says nothing that is worth more."""
    monkeypatch.setattr(later_audits, "AUDITS", {"full": Audit(max_new_tokens=4)})
    with transaction(light_shop.engine) as session:
        return later_audits.ask_by_name(session, light_shop.key.id, released_job, 0, light_shop.settings())


Ending = Callable[[Session], bool]


def audit_it(shop: Shop, work: Work) -> tuple[Claim, Ending, Any]:
    """Do the job that asks, up to what is to be written; with the stage's own record of the weights."""
    with transaction(shop.engine) as session:
        claim = lease.claim(session, "worker", 60)
    assert claim
    job = shop.job(claim.job_id)
    with new_folder(shop.work_dir, "audit") as folder:
        fill(folder, job, shop.storage, shop.settings(), lambda: None)
        work(folder)
        stage = json.loads((folder.stage / "audit.json").read_text())
        return claim, upload(shop.storage, job, claim, folder, signing_key(shop.settings())), stage


def test_today_s_audit_decides_on_the_very_weights_of_the_archive(
    light_shop: Shop,
    released_job: str,
    requested_audit: LaterAudit,
    finished_job: tuple[Folder, Heard],
    work: Work,
    message_pipe: Heard,
) -> None:
    _, ending, stage = audit_it(light_shop, work)
    with transaction(light_shop.engine) as session:
        assert ending(session)
    assert stage["weights"] == json.loads((finished_job[0].stage / "audit.json").read_text())["weights"]
    assert not message_pipe.of_kind("metrics")  # nothing was trained
    with read(light_shop.engine) as session:
        audit = session.get_one(LaterAudit, requested_audit.id)
        audit_job = session.get_one(Job, requested_audit.audit_job_id)
    assert (audit_job.status, audit_job.adapter, audit_job.fine_tuned_model) == (JobStatus.succeeded, None, None)
    assert audit.record
    assert audit.signature
    facts = json.loads(audit.record)
    assert (facts["job_id"], facts["gate"]["decision"]) == (released_job, audit.decision)
    adapter = light_shop.job(released_job).adapter
    assert adapter is not None
    assert facts["archive_sha256"] == adapter["sha256"]
    assert facts["audit_version"] == AUDIT_VERSION
    assert {each["suite"] for each in facts["audit"]["adapter"]} >= set(SUITES)
    public = Ed25519PublicKey.from_public_bytes(base64.b64decode(audit.signature["public_key"]))
    public.verify(base64.b64decode(audit.signature["signature"]), audit.record.encode())
    assert any("later audit" in event for event in light_shop.events(released_job))


def test_a_worker_that_has_lost_its_lease_decides_nothing(
    light_shop: Shop, released_job: str, requested_audit: LaterAudit, tmp_path: Path
) -> None:
    shop, folder = light_shop, Folder(tmp_path / "job")
    with transaction(shop.engine) as session:
        claim = lease.claim(session, "worker", 60)
    assert claim
    folder.results.mkdir(parents=True)
    folder.later_audit.write_text(json.dumps({"gate": {"decision": "pass", "reasons": []}, "audit_version": 2}))
    ending = upload(shop.storage, shop.job(claim.job_id), claim, folder, signing_key(shop.settings()))
    with transaction(shop.engine) as session:
        assert lease.requeue(session, claim, 0.0, "the machine was lost")
        assert lease.claim(session, "another", 60)
    with transaction(shop.engine) as session:
        assert not ending(session)
    with read(shop.engine) as session:
        assert session.get_one(LaterAudit, requested_audit.id).decision is None
