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

from app.main import create_app
from app.settings import Settings
from tests.app.http.conftest import FILES, JOBS, Service, Upload, rows
from tests.conftest import Place

Ask = dict[str, Any]


@pytest.fixture
def settings(database_url: str, moto_place: Place, tmp_path: Path) -> Settings:
    return Settings(
        data_dir=tmp_path,
        database_url=SecretStr(database_url),
        storage_url=moto_place.url,
        s3_endpoint_url=moto_place.endpoint_url,
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


def test_a_refused_file_leaves_nothing_in_the_bucket(moto_place: Place, upload: Upload) -> None:
    for content in (b"PK\x03\x04" + b"\0" * 100, b"", rows(20_000) + b"\xff\n"):
        assert upload(content).status_code in (400, 415)
    with closing(boto3.client("s3", endpoint_url=moto_place.endpoint_url, region_name="us-east-1")) as s3:
        assert s3.list_objects_v2(Bucket=urlsplit(moto_place.url).netloc)["KeyCount"] == 0


def test_jobs_are_listed_and_found(customer: TestClient, asked: Ask) -> None:
    ids = [customer.post(JOBS, json=asked | {"metadata": {"n": str(n)}}).json()["id"] for n in range(3)]
    last = customer.post(JOBS, json=asked).json()["id"]
    page = customer.get(JOBS, params={"limit": 2, "after": last}).json()
    assert [job["id"] for job in page["data"]] == ids[:0:-1]
    assert [job["id"] for job in customer.get(f"{JOBS}?metadata[n]=1").json()["data"]] == [ids[1]]
    assert [job["id"] for job in customer.get(f"{JOBS}?metadata=null").json()["data"]] == [last]


def test_one_key_sent_many_times_at_once_makes_one_job(service: Service, customer: TestClient, asked: Ask) -> None:
    def send(n: int) -> str:
        client = TestClient(service.app, headers=dict(customer.headers))
        job_id: str = client.post(JOBS, json=asked, headers={"idempotency-key": "once"}).json()["id"]
        return job_id

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(send, range(8)))) == 1


@pytest.mark.parametrize(
    "path",
    [f"{FILES}/%00", f"{JOBS}/\u202e", f"{JOBS}?metadata[a]=%00", f"{FILES}?after=%00", f"{JOBS}?metadata[%00]=a"],
)
def test_odd_text_is_no_server_error(path: str, customer: TestClient) -> None:
    assert customer.get(path).status_code in (400, 404)
