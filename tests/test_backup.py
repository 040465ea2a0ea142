"""A backup is worth what a restore gives: the same jobs, the same bytes, and work that goes on."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

import boto3
import pytest
from fastapi.testclient import TestClient

from app import keys
from app.db import transaction
from app.db.tables import JobStatus
from app.jobs import lease
from app.main import create_app
from tests import servers
from tests.narrowing import require
from tests.place import Place
from tests.spard.parts import write_model
from tests.worker.shop import Shop

JOBS = "/v1/fine_tuning/jobs"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


def test_postgres_and_a_bucket_come_back(
    tmp_path: Path, postgres_url: str, empty_postgres_url: str, moto_place: Place, model: Path
) -> None:
    def copy_database() -> str:
        dump = tmp_path / "spard.dump"
        postgres("pg_dump", "--format=custom", f"--file={dump}", plain(postgres_url))
        postgres("pg_restore", "--exit-on-error", f"--dbname={plain(empty_postgres_url)}", str(dump))
        return empty_postgres_url

    shop = Shop(tmp_path / "data", postgres_url, moto_place, model)
    check_restored(shop, copy_database, lambda: copied_bucket(moto_place))


def test_sqlite_and_a_folder_come_back(tmp_path: Path, sqlite_url: str, local_place: Place, model: Path) -> None:
    def copy_database() -> str:
        copy = tmp_path / "copy.db"
        with closing(sqlite3.connect(tmp_path / "spard.db")) as database:
            database.execute(f"VACUUM INTO '{copy}'")
        return f"sqlite:///{copy}"

    def copy_objects() -> Place:
        shutil.copytree(tmp_path / "objects", tmp_path / "copied")
        return Place(f"file://{tmp_path / 'copied'}")

    check_restored(Shop(tmp_path / "data", sqlite_url, local_place, model), copy_database, copy_objects)


def check_restored(shop: Shop, copy_database: Callable[[], str], copy_objects: Callable[[], Place]) -> None:
    """A job that has ended is served, byte by byte; one that ran at the time of the dump is done."""
    done = shop.do("good")
    begun = shop.add_job()
    with transaction(shop.engine) as session:
        _, secret = keys.create(session, shop.key.project_id, "customer", ["customer"])
        assert lease.claim(session, "a worker that is gone", 0.1)
    url, place = copy_database(), copy_objects()  # in this order: an object without a row is harmless
    erase(shop)
    time.sleep(0.2)

    restored = Shop(shop.folder.parent / "restored", url, place, shop.model)
    with TestClient(create_app(restored.settings())) as client:
        client.headers["authorization"] = f"Bearer {secret}"
        listed = {job["id"]: job["status"] for job in client.get(JOBS).json()["data"]}
        content = download(client, f"{JOBS}/{done.id}/adapter")
    with restored.serving("good"):
        again = restored.until_ended(begun)
    restored.engine.dispose()
    assert listed.keys() == {done.id, begun}
    assert listed[done.id] == "succeeded"
    assert listed[begun] in ("running", "queued")  # the API hands back what a worker that is gone had begun
    assert sha256(content).hexdigest() == require(done.adapter)["sha256"]
    assert (again.status, again.attempt) == (JobStatus.succeeded, 2)


def download(client: TestClient, path: str) -> bytes:
    """From the service, or from where it sends us."""
    answer = client.get(path, follow_redirects=False)
    if "location" not in answer.headers:
        return answer.content
    with urllib.request.urlopen(answer.headers["location"]) as object_:  # noqa: S310 - our own server
        content: bytes = object_.read()
    return content


def erase(shop: Shop) -> None:
    """What the backup was made of is gone."""
    job_keys = [file.storage_key for job_id in all_jobs(shop) for file in shop.files(shop.job(job_id))]
    shop.engine.dispose()
    for key in job_keys:
        shop.storage.delete(key)
    shutil.rmtree(shop.folder)


def all_jobs(shop: Shop) -> list[str]:
    with shop.engine.connect() as connection:
        return [row[0] for row in connection.exec_driver_sql("SELECT id FROM jobs")]


def copied_bucket(place: Place) -> Place:
    """Every object of a bucket in another one, as `aws s3 sync` does it."""
    client = boto3.client("s3", endpoint_url=place.endpoint_url, region_name="us-east-1")
    bucket = urlsplit(place.url).netloc
    client.create_bucket(Bucket=f"{bucket}-copy")
    for item in client.list_objects_v2(Bucket=bucket)["Contents"]:
        client.copy_object(Bucket=f"{bucket}-copy", Key=item["Key"], CopySource={"Bucket": bucket, "Key": item["Key"]})
    client.close()
    return Place(place.url.replace(bucket, f"{bucket}-copy"), place.endpoint_url)


def postgres(tool: str, *arguments: str) -> None:
    subprocess.run([servers.postgres_client(tool), *arguments], check=True)


def plain(url: str) -> str:
    return url.replace("+psycopg", "")
