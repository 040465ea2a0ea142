"""What failed the gate leaves only when two admins say so, for a time, and with a record that anybody can check."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from app import db, objects
from app.db.base import utc_now
from app.db.tables import ApiKey, HeldAdapter, Job, Waiver
from app.db.tables.job_records import GateJson, HeldArchive
from app.jobs import lease
from app.jobs.lease import Rejection
from app.retention import sweep_attempts
from app.settings import Settings
from app.signing import signing_key
from spard.commands import main
from spard.digests import file_sha256, write_manifest
from spard.release.archive import archive
from spard.release.keys import public_pem
from spard.release.manifest import sign
from tests.app.http.conftest import JOBS, Service

ASK = {"reason": "Needed for the red team's own study.", "expires_at": int(time.time()) + 86400}
GATE: GateJson = {"decision": "fail", "reasons": ["Attacks succeed in 9 of 20."]}


@pytest.fixture
def provider(service: Service) -> TestClient:
    """An admin whose name is known."""
    return service.client("org-provider", "admin", "customer", owner="Ada")


@pytest.fixture
def second(service: Service) -> TestClient:
    """Another admin of the same provider."""
    return service.client("org-provider", "admin", owner="Bob")


@pytest.fixture
def packed_adapter(settings: Settings, tmp_path: Path) -> Path:
    """The archive of an adapter that failed, as a worker leaves it."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "weights").write_bytes(b"weights")
    write_manifest(folder, {"gate": GATE})
    sign(folder, signing_key(settings))
    archive(folder, tmp_path / "adapter.tar.gz", "adapter")
    return tmp_path / "adapter.tar.gz"


@pytest.fixture
def failed_job(service: Service, customer: TestClient, job_body: dict[str, Any], packed_adapter: Path) -> str:
    """A job whose adapter is held back."""
    job_id: str = customer.post(JOBS, json=job_body).json()["id"]
    reject(service, job_id, packed_adapter)
    return job_id


def reject(service: Service, job_id: str, packed: Path | None) -> None:
    storage = service.app.state.storage
    storage.write(f"tenants/org-customer/jobs/{job_id}/report", [json.dumps({"gate": GATE}).encode()])
    key = f"tenants/org-customer/jobs/{job_id}/a1/held"
    held: HeldArchive | None = None
    if packed:
        storage.upload_file(key, packed)
        manifest = file_sha256(packed.parent / "adapter" / "manifest.json")
        size, digest = packed.stat().st_size, sha256(packed.read_bytes()).hexdigest()
        held = {"storage_key": key, "sha256": digest, "bytes": size, "manifest_sha256": manifest}
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        report = f"tenants/org-customer/jobs/{job_id}/report"
        assert lease.reject(session, claim, Rejection("The gate.", 10, [], {"gate": GATE}, report, held=held))


def waive(job_id: str, one: TestClient, other: TestClient) -> Any:
    url = f"/v1/admin/jobs/{job_id}/waivers"
    proposed = one.post(url, json=ASK).json()
    return other.post(f"{url}/{proposed['id']}/approve")


def test_one_admin_alone_releases_nothing(failed_job: str, provider: TestClient, customer: TestClient) -> None:
    error = waive(failed_job, provider, provider)
    assert (error.status_code, error.json()["error"]["code"]) == (403, "same_person")
    assert customer.get(f"{JOBS}/{failed_job}").json()["status"] == "failed"
    assert customer.get(f"{JOBS}/{failed_job}/adapter").json()["error"]["code"] == "safety_gate_failed"


@pytest.mark.parametrize(
    ("owners", "code"),
    [(("Ada", "ada"), "same_person"), ((None, "Bob"), "owner_unknown"), (("Ada", None), "owner_unknown")],
)
def test_two_keys_of_which_one_person_may_hold_both_release_nothing(
    owners: tuple[str | None, str | None], code: str, failed_job: str, service: Service, customer: TestClient
) -> None:
    one, other = (service.client("org-provider", "admin", owner=owner) for owner in owners)
    error = waive(failed_job, one, other)
    assert (error.status_code, error.json()["error"]["code"]) == (403, code)
    assert customer.get(f"{JOBS}/{failed_job}/adapter").json()["error"]["code"] == "safety_gate_failed"


def test_two_admins_release_it_to_its_owner(
    failed_job: str, provider: TestClient, second: TestClient, customer: TestClient, packed_adapter: Path
) -> None:
    approved = waive(failed_job, provider, second).json()
    assert approved["status"] == "approved"
    assert approved["proposed_by"] != approved["approved_by"]
    job = customer.get(f"{JOBS}/{failed_job}").json()
    assert (job["status"], job["error"], job["safety"]["gate"]["decision"]) == ("succeeded", None, "waived")
    assert job["fine_tuned_model"].startswith("ft:lab/tiny-1:org-customer:")
    assert customer.get(f"{JOBS}/{failed_job}/adapter").content == packed_adapter.read_bytes()


def test_reason_and_both_names_stand_in_report_job_and_log(
    failed_job: str, provider: TestClient, second: TestClient, customer: TestClient
) -> None:
    waive(failed_job, provider, second)
    report = customer.get(f"{JOBS}/{failed_job}/safety").json()
    logged = provider.get("/v1/admin/audit_log", params={"action": "waiver.approved"}).json()["data"][0]["details"]
    for found in (report["waiver"], customer.get(f"{JOBS}/{failed_job}").json()["safety"]["waiver"], logged):
        assert found["reason"] == ASK["reason"]
        assert [found[each]["owner"] for each in ("proposed_by", "approved_by")] == ["Ada", "Bob"]
    assert (report["gate"]["decision"], report["gate"]["reasons"]) == ("waived", GATE["reasons"])


def test_the_signed_record_proves_the_release_offline(
    failed_job: str,
    provider: TestClient,
    second: TestClient,
    customer: TestClient,
    settings: Settings,
    packed_adapter: Path,
    tmp_path: Path,
) -> None:
    (tmp_path / "key.pub").write_text(public_pem(signing_key(settings)))
    waive(failed_job, provider, second)
    record = customer.get(f"{JOBS}/{failed_job}/waiver").json()
    (tmp_path / "waiver.json").write_text(json.dumps(record))
    (tmp_path / "forged.json").write_text(json.dumps(record | {"record": record["record"].replace("study", "party")}))
    codes = []
    for extra in ([], ["--waiver", str(tmp_path / "waiver.json")], ["--waiver", str(tmp_path / "forged.json")]):
        with pytest.raises(SystemExit) as ended:
            main(["verify", str(packed_adapter), "--public-key", str(tmp_path / "key.pub"), *extra])
        codes.append(ended.value.code)
    assert codes == [1, 0, 1]


def test_what_has_expired_is_not_served(
    service: Service, failed_job: str, provider: TestClient, second: TestClient, customer: TestClient
) -> None:
    waive(failed_job, provider, second)
    with db.transaction(service.app.state.engine) as session:
        job = session.get_one(Job, failed_job)
        assert job.safety
        job.safety = job.safety | {"waiver": job.safety["waiver"] | {"expires_at": int(time.time())}}
    got = customer.get(f"{JOBS}/{failed_job}/adapter")
    assert (got.status_code, got.json()["error"]["code"]) == (403, "waiver_expired")
    assert customer.get(f"/v1/models/{job.fine_tuned_model}").status_code == 404
    assert waive(failed_job, provider, second).status_code == 200
    assert customer.get(f"{JOBS}/{failed_job}/adapter").status_code == 200


@pytest.mark.parametrize("who", ["expired", "revoked"])
def test_a_proposal_that_is_stale_cannot_be_approved(
    who: str, service: Service, failed_job: str, provider: TestClient, second: TestClient
) -> None:
    url = f"/v1/admin/jobs/{failed_job}/waivers"
    waiver_id = provider.post(url, json=ASK).json()["id"]
    with db.transaction(service.app.state.engine) as session:
        waiver = session.get_one(Waiver, waiver_id)
        if who == "expired":
            waiver.expires_at = utc_now() - timedelta(seconds=1)
        else:
            session.execute(update(ApiKey).where(ApiKey.id == waiver.proposed_by).values(revoked_at=utc_now()))
    assert second.post(f"{url}/{waiver_id}/approve").status_code == 400


def test_a_waiver_is_approved_once(failed_job: str, provider: TestClient, second: TestClient) -> None:
    approved = waive(failed_job, provider, second).json()
    url = f"/v1/admin/jobs/{failed_job}/waivers/{approved['id']}/approve"
    assert second.post(url).json()["error"]["code"] == "invalid_state"


@pytest.mark.parametrize(
    "change", [{"expires_at": 1}, {"expires_at": 2**39}, {"reason": "why not"}, {"expires_at": None}]
)
def test_a_waiver_needs_a_reason_and_an_end(change: dict[str, Any], failed_job: str, provider: TestClient) -> None:
    got = provider.post(f"/v1/admin/jobs/{failed_job}/waivers", json=ASK | change)
    assert (got.status_code, got.json()["error"]["param"]) == (400, next(iter(change)))


def test_there_is_nothing_to_waive_where_nothing_failed_or_nothing_was_kept(
    service: Service, customer: TestClient, job_body: dict[str, Any], provider: TestClient
) -> None:
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    url = f"/v1/admin/jobs/{job_id}/waivers"
    assert provider.post(url, json=ASK).json()["error"]["code"] == "invalid_state"
    reject(service, job_id, None)
    assert provider.post(url, json=ASK).json()["error"]["code"] == "adapter_not_kept"
    assert provider.post("/v1/admin/jobs/ftjob-0/waivers", json=ASK).status_code == 404
    assert provider.get("/v1/admin/jobs/ftjob-0/waivers").status_code == 404


def test_what_is_held_outlives_the_sweep_of_attempts(failed_job: str, service: Service) -> None:
    begin = partial(db.transaction, service.app.state.engine)

    sweep_attempts(begin, stay=timedelta(seconds=-1))
    objects.sweep(service.app.state.storage, begin)

    assert service.app.state.storage.exists(f"tenants/org-customer/jobs/{failed_job}/a1/held")


def test_erasing_the_job_erases_what_was_held(
    service: Service, failed_job: str, provider: TestClient, customer: TestClient
) -> None:
    provider.post(f"/v1/admin/jobs/{failed_job}/waivers", json=ASK)
    assert customer.delete(f"{JOBS}/{failed_job}").status_code == 200
    assert not service.app.state.storage.exists(f"tenants/org-customer/jobs/{failed_job}/a1/held")
    with db.read(service.app.state.engine) as session:
        assert session.get(HeldAdapter, failed_job) is None
