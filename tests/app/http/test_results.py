"""What a job leaves behind: nothing leaves the service that passed no gate, but to the provider who waived it."""

from __future__ import annotations

import base64
import json
from copy import deepcopy
from hashlib import sha256
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from fastapi.testclient import TestClient
from google.protobuf.json_format import ParseDict
from in_toto_attestation.predicates.test_result.v0 import test_result_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer._key import SSlibKey

from app import db
from app.db.tables.job_records import Adapter, HeldArchive, ResolvedJson, SafetySummary
from app.jobs import lease
from app.jobs.lease import Publication, Rejection
from tests.app.http.conftest import FILES, JOBS, Service, rows

ARCHIVE = b"an adapter archive" * 100
REPORT = b'{"gate": {"decision": "pass"}}'
MODEL = "ft:lab/tiny-1:org-customer::1"


def _claim_job(service: Service) -> lease.Claim:
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
    assert claim is not None
    return claim


def publish(service: Service, decision: str, model: str = MODEL, waiver: Any = None, at: str = "jobs") -> None:
    """End the queued job as a worker would, or as one whose waiver was approved."""
    claim, storage = _claim_job(service), service.app.state.storage
    storage.write(f"{at}/adapter", [ARCHIVE])
    storage.write("jobs/report", [REPORT])
    adapter: Adapter = {"storage_key": f"{at}/adapter", "sha256": sha256(ARCHIVE).hexdigest(), "bytes": len(ARCHIVE)}
    safety: SafetySummary = {"gate": {"decision": decision, "reasons": []}, "asr": {"base": 0.0, "adapter": 0.01}}
    if waiver is not None:
        safety["waiver"] = waiver
    with db.transaction(service.app.state.engine) as session:
        resolved: ResolvedJson = {
            "n_epochs": 3,
            "batch_size": 4,
            "learning_rate_multiplier": 1.0,
            "learning_rate": 0.002,
        }
        assert lease.update(session, claim, resolved=resolved)
        assert lease.publish(session, claim, Publication(model, 10, [], adapter, safety, "jobs/report"))


@pytest.fixture
def job(customer: TestClient, job_body: dict[str, Any]) -> str:
    job_id: str = customer.post(JOBS, json=job_body).json()["id"]
    return job_id


def test_there_is_no_adapter_before_the_end(customer: TestClient, job: str) -> None:
    got = customer.get(f"{JOBS}/{job}/adapter")
    assert (got.status_code, got.json()["error"]["code"]) == (400, "not_published")
    assert customer.get(f"{JOBS}/{job}/safety").json()["error"]["code"] == "report_not_ready"


def test_a_job_that_passed_shows_what_was_measured(service: Service, customer: TestClient, job: str) -> None:
    publish(service, "pass")
    shown = customer.get(f"{JOBS}/{job}").json()
    assert (shown["status"], shown["fine_tuned_model"], shown["hyperparameters"]["batch_size"]) == (
        "succeeded",
        MODEL,
        4,
    )
    assert (shown["safety"]["asr"]["adapter"], shown["safety"]["gate"]["decision"]) == (0.01, "pass")


def test_its_adapter_and_report_are_served(service: Service, customer: TestClient, job: str) -> None:
    publish(service, "pass")
    got = customer.get(f"{JOBS}/{job}/adapter")
    assert got.content == ARCHIVE
    assert f"{job}-adapter.tar.gz" in got.headers["content-disposition"]
    part = customer.get(f"{JOBS}/{job}/adapter", headers={"range": "bytes=100-"})
    assert (part.status_code, part.content) == (206, ARCHIVE[100:])
    assert customer.get(f"{JOBS}/{job}/safety").content == REPORT


def test_its_model_is_listed_to_its_owner_alone(
    service: Service, customer: TestClient, stranger: TestClient, job: str
) -> None:
    publish(service, "pass")
    assert [model["id"] for model in customer.get("/v1/models").json()["data"]] == ["lab/tiny-1", MODEL]
    assert customer.get(f"/v1/models/{MODEL.replace('/', '%2F')}").json()["owned_by"] == "org-customer"
    assert stranger.get(f"/v1/models/{MODEL}").status_code == 404
    assert [model["id"] for model in stranger.get("/v1/models").json()["data"]] == ["lab/tiny-1"]


def test_a_rejected_job_keeps_its_report_and_not_its_adapter(service: Service, customer: TestClient, job: str) -> None:
    service.app.state.storage.write("jobs/report", [REPORT])
    safety: SafetySummary = {"gate": {"decision": "fail", "reasons": ["ASR 90 %"]}}
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        assert lease.reject(session, claim, Rejection("The gate.", 10, [], safety, "jobs/report"))
    shown = customer.get(f"{JOBS}/{job}").json()
    assert (shown["status"], shown["error"]["code"]) == ("failed", "safety_gate_failed")
    assert shown["safety"]["gate"] == safety["gate"]
    assert customer.get(f"{JOBS}/{job}/adapter").json()["error"]["code"] == "safety_gate_failed"
    assert customer.get(f"{JOBS}/{job}/safety").content == REPORT


def test_a_waived_adapter_is_the_providers_alone(service: Service, provider_with_model: TestClient) -> None:
    file = provider_with_model.post(FILES, data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", rows(10))}).json()
    ask = {"model": "lab/tiny-1", "training_file": file["id"], "safety": {"defense": {"type": "none"}}}
    job_id = provider_with_model.post(JOBS, json=ask).json()["id"]
    publish(service, "waived")
    colleague = service.client("org-provider", "customer")
    assert provider_with_model.get(f"{JOBS}/{job_id}/adapter").content == ARCHIVE
    assert colleague.get(f"{JOBS}/{job_id}/adapter").status_code == 403


def attestation(customer: TestClient, job: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The envelope of a job's audit, and the statement in it."""
    got = customer.get(f"{JOBS}/{job}/safety/attestation")
    assert got.status_code == 200, got.text
    assert f"{job}-audit.intoto.json" in got.headers["content-disposition"]
    envelope: dict[str, Any] = got.json()
    return envelope, json.loads(base64.b64decode(envelope["payload"]))


@pytest.mark.parametrize("decision", ["pass", "waived"])
def test_its_audit_is_attested_about_its_archive(
    service: Service, customer: TestClient, job: str, decision: str
) -> None:
    waiver = {"reason": "known", "by": "a, b"} if decision == "waived" else None
    publish(service, decision, waiver=waiver)
    _, statement = attestation(customer, job)
    Statement.copy_from_pb(ParseDict(statement, statement_pb2.Statement())).validate()
    found = ParseDict(statement["predicate"], test_result_pb2.TestResult())
    assert statement["subject"] == [
        {"name": f"{job}-adapter.tar.gz", "digest": {"sha256": sha256(ARCHIVE).hexdigest()}}
    ]
    assert found.result == "PASSED"
    by_name = {each.name: each.digest["sha256"] for each in found.configuration}
    assert by_name["safety.json"] == sha256(REPORT).hexdigest()
    assert any(name.startswith("suite ") for name in by_name)


def test_the_attestation_is_signed_by_a_key_of_the_published_set(
    service: Service, customer: TestClient, job: str
) -> None:
    """Verified by in-toto's own library, which knows nothing of ours."""
    publish(service, "pass")
    envelope, _ = attestation(customer, job)
    keys = json.loads(json.loads(customer.get("/v1/signing_keys").text)["record"])
    (signature,) = envelope["signatures"]
    (pem,) = [each["public_key"] for each in keys["keys"] if each["key_id"] == signature["keyid"]]
    public = Ed25519PublicKey.from_public_bytes(base64.b64decode(pem))
    key = SSlibKey.from_crypto(public, keyid=signature["keyid"])
    assert Envelope.from_dict(deepcopy(envelope)).verify([key], 1).keys() == {signature["keyid"]}
    for change in ({"payload": base64.b64encode(b"{}").decode()}, {"payloadType": "application/json"}):
        with pytest.raises(VerificationError):
            Envelope.from_dict(deepcopy(envelope) | change).verify([key], 1)


def test_a_job_whose_adapter_is_gone_has_nothing_to_attest(service: Service, customer: TestClient, job: str) -> None:
    claim = _claim_job(service)
    service.app.state.storage.write("jobs/report", [REPORT])
    rejection = Rejection("The gate.", 10, [], {"gate": {"decision": "fail", "reasons": []}}, "jobs/report")
    with db.transaction(service.app.state.engine) as session:
        assert lease.reject(session, claim, rejection)
    error = customer.get(f"{JOBS}/{job}/safety/attestation").json()["error"]
    assert error["code"] == "not_attested"


def test_the_archive_that_was_held_back_is_attested_as_failed(service: Service, customer: TestClient, job: str) -> None:
    claim = _claim_job(service)
    service.app.state.storage.write("jobs/report", [b'{"gate": {"decision": "fail", "reasons": ["More."]}}'])
    held: HeldArchive = {"storage_key": "jobs/held", "sha256": "7" * 64, "bytes": 1, "manifest_sha256": "8" * 64}
    gate: SafetySummary = {"gate": {"decision": "fail", "reasons": ["More."]}}
    with db.transaction(service.app.state.engine) as session:
        assert lease.reject(session, claim, Rejection("The gate.", 10, [], gate, "jobs/report", held=held))
    _, statement = attestation(customer, job)
    assert statement["subject"][0]["digest"] == {"sha256": "7" * 64}
    assert (statement["predicate"]["result"], statement["predicate"]["failedTests"]) == ("FAILED", ["gate"])
