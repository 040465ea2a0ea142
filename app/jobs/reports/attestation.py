"""The audit of a job as a signed in-toto attestation: a test result about the archive of its adapter."""

from __future__ import annotations

import hashlib
import json

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select

from app import db
from app.db.tables import HeldAdapter, Job
from app.errors import HasNone
from app.jobs.reports.service import ReportJson, waiver_facts, with_waiver
from spard.release.audit_attestation import Audited, audit_statement
from spard.release.dsse import Envelope, sign_statement
from spard.release.report import SafetyReport


def tested_archive(reader: db.Reader, job: Job) -> str:
    """Return the SHA-256 of the archive that was audited, released or held back; `HasNone` where there is none."""
    if job.adapter:
        return job.adapter["sha256"]
    sha256 = reader.scalar(select(HeldAdapter.sha256).where(HeldAdapter.job_id == job.id))
    if sha256 is None:
        message = f"The adapter of {job.id} was not kept, so that there is nothing to attest; its report stays."
        raise HasNone(message, code="not_attested", param="fine_tuning_job_id")
    return sha256


def attest(job: Job, sha256: str, content: bytes, key: Ed25519PrivateKey) -> Envelope:
    """Return the DSSE envelope; `sha256` is the archive's, `content` the bytes of the report as they are stored."""
    report: ReportJson = json.loads(content)
    audited = Audited.from_report(SafetyReport.from_json(with_waiver(report, waiver_facts(job))))
    suites = {f"suite {suite.name}": suite.sha256 for suite in job.spec.suites}
    resources = {"safety.json": hashlib.sha256(content).hexdigest()} | suites
    return sign_statement(audit_statement(audited, {f"{job.id}-adapter.tar.gz": sha256}, resources), key)
