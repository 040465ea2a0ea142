"""The same service on PostgreSQL and on S3."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import httpx2
import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr
from sqlalchemy import select

from app import db
from app.db.tables import Outbox
from app.main import create_app
from app.settings import Settings
from app.storage import open_storage
from tests.app.http.conftest import FILES, JOBS, Service, Upload, rows
from tests.place import Place

Ask = dict[str, Any]


@pytest.fixture
def settings(database_url: str, moto_place: Place, tmp_path: Path) -> Settings:
    return Settings(
        data_dir=tmp_path,
        database_url=SecretStr(database_url),
        storage_url=moto_place.url,
        s3_endpoint_url=moto_place.endpoint_url,
        s3_public_endpoint_url=moto_place.endpoint_url,
        broker_url=SecretStr("redis://127.0.0.1:9/0"),  # nobody: what is to be sent waits
    )


@pytest.fixture
def service(settings: Settings) -> Iterator[Service]:
    app = create_app(settings)
    with TestClient(app) as http:
        yield Service(app, http)


def test_a_file_comes_back_over_a_signed_link(upload: Upload, customer: TestClient) -> None:
    got = customer.get(f"{FILES}/{upload(rows(10)).json()['id']}/content", follow_redirects=False)
    assert got.status_code == 302
    assert httpx2.get(got.headers["location"]).content == rows(10)


def test_an_inside_name_is_never_told_and_the_bytes_come_through_the_service(
    service: Service, settings: Settings, upload: Upload, customer: TestClient
) -> None:
    path = f"{FILES}/{upload(rows(10)).json()['id']}/content"
    for downloads, public in (("auto", None), ("stream", "https://s3.example.org")):
        service.app.state.settings = settings.model_copy(
            update={"downloads": downloads, "s3_public_endpoint_url": public}
        )
        got = customer.get(path, follow_redirects=False)
        assert (got.status_code, got.content) == (200, rows(10))
        part = customer.get(path, headers={"range": "bytes=2-5"}, follow_redirects=False)
        assert (part.status_code, part.content) == (206, rows(10)[2:6])


def test_a_link_names_the_public_endpoint(
    service: Service, settings: Settings, upload: Upload, customer: TestClient
) -> None:
    service.app.state.quick_storage = open_storage(
        settings.storage(), settings.s3_endpoint_url, public_endpoint_url="https://s3.example.org"
    )
    file_id = upload(rows(10)).json()["id"]
    location = urlsplit(customer.get(f"{FILES}/{file_id}/content", follow_redirects=False).headers["location"])
    assert (location.scheme, location.netloc) == ("https", "s3.example.org")
    assert "X-Amz-Signature" in location.query


def test_a_job_and_its_wake_up_are_made_together(service: Service, customer: TestClient, job_body: Ask) -> None:
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    with db.read(service.app.state.engine) as session:
        assert [row.payload for row in session.scalars(select(Outbox))] == [{"job_id": job_id}]


def test_a_refused_file_leaves_nothing_in_the_bucket(moto_place: Place, upload: Upload) -> None:
    for content in (b"PK\x03\x04" + b"\0" * 100, b"", rows(20_000) + b"\xff\n"):
        assert upload(content).status_code == 400
    with closing(boto3.client("s3", endpoint_url=moto_place.endpoint_url, region_name="us-east-1")) as s3:
        assert s3.list_objects_v2(Bucket=urlsplit(moto_place.url).netloc)["KeyCount"] == 0


KEYS = ["run", "ключ", "鍵", "🔑", 'a"b', "a[0]", "a]b", "a.b", "a\\b", "$", " a ", "it's", "%", "null"]


@pytest.mark.parametrize("key", KEYS)
def test_jobs_are_found_by_metadata_in_every_script(key: str, customer: TestClient, job_body: Ask) -> None:
    wanted = customer.post(JOBS, json=job_body | {"metadata": {key: f"wert {key}", "n": "1"}}).json()
    customer.post(JOBS, json=job_body | {"metadata": {"other": f"wert {key}", f"{key}x": f"wert {key}"}})
    found = customer.get(JOBS, params={f"metadata[{key}]": f"wert {key}", "metadata[n]": "1"}).json()["data"]
    assert [(job["id"], job["metadata"]) for job in found] == [(wanted["id"], wanted["metadata"])]
    assert customer.get(JOBS, params={f"metadata[{key}]": "another"}).json()["data"] == []


def test_jobs_are_listed_and_found(customer: TestClient, job_body: Ask) -> None:
    ids = [customer.post(JOBS, json=job_body | {"metadata": {"n": str(n)}}).json()["id"] for n in range(3)]
    last = customer.post(JOBS, json=job_body).json()["id"]
    page = customer.get(JOBS, params={"limit": 2, "after": last}).json()
    assert [job["id"] for job in page["data"]] == ids[:0:-1]
    assert [job["id"] for job in customer.get(f"{JOBS}?metadata[n]=1").json()["data"]] == [ids[1]]
    assert [job["id"] for job in customer.get(f"{JOBS}?metadata=null").json()["data"]] == [last]


def test_one_key_sent_many_times_at_once_makes_one_job(service: Service, customer: TestClient, job_body: Ask) -> None:
    def send(n: int) -> str:
        client = TestClient(service.app, headers=dict(customer.headers))
        job_id: str = client.post(JOBS, json=job_body, headers={"idempotency-key": "once"}).json()["id"]
        return job_id

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(send, range(8)))) == 1


@pytest.mark.parametrize(
    "path",
    [f"{FILES}/%00", f"{JOBS}/\u202e", f"{JOBS}?metadata[a]=%00", f"{FILES}?after=%00", f"{JOBS}?metadata[%00]=a"],
)
def test_odd_text_is_no_server_error(path: str, customer: TestClient) -> None:
    assert customer.get(path).status_code in (400, 404)
