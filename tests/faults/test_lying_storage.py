"""An S3 that sends wrong ETags, old or cut bodies, or asks to slow down: digests find it, and it is asked again."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from app.db import make_engine
from app.db.tables import JobStatus
from app.signing import signing_key
from app.storage import S3Storage, StorageError, open_storage, s3
from tests.faults import invariants
from tests.faults.lies import LIES, Liar
from tests.faults.proxy import proxy
from tests.faults.storm import CALM
from tests.faults.test_failover import run_worker
from tests.place import Place
from tests.worker.shop import Shop
from worker.attempt import Backend


@pytest.mark.parametrize("lie", LIES)
def test_a_job_whose_every_object_is_first_read_wrongly_succeeds_in_its_first_attempt(
    sqlite_url: str, moto_place: Place, model: Path, tmp_path: Path, lie: str
) -> None:
    straight = open_storage(moto_place.url, moto_place.endpoint_url)
    liar = Liar(straight, lie)
    with proxy(moto_place.endpoint_url or "", liar.answer) as (_, url):
        shop = Shop(tmp_path / "data", sqlite_url, Place(moto_place.url, url), model)
        settings = shop.settings(**CALM)
        key = signing_key(settings)
        backend = Backend(settings, make_engine(sqlite_url), open_storage(moto_place.url, url), key)
        with run_worker(backend, shop):
            job_id = shop.add_job()
            job = shop.until_ended(job_id)
        read = {spec.storage_key for spec in (job.spec.training_file, job.spec.pool, *job.spec.suites) if spec}
        shop.storage = straight
        invariants.check(shop, [job_id])
        shop.engine.dispose()
    assert (job.status, job.attempt, job.lease_token) == (JobStatus.succeeded, 1, 1)
    assert read <= liar.told.keys(), "vacuous: not every object was read wrongly"


def test_a_part_with_a_wrong_etag_leaves_no_object_and_the_next_write_is_whole(
    moto_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)  # the least that S3 takes
    storage, content = cast(S3Storage, open_storage(moto_place.url, moto_place.endpoint_url)), bytes(6 << 20)
    wrong = [f'"{"0" * 32}"']

    def change(parsed: dict[str, object], **about: object) -> None:
        if wrong:
            parsed["ETag"] = wrong.pop()

    storage._client.meta.events.register("after-call.s3.UploadPart", change)
    with pytest.raises(StorageError):
        storage.write("inputs/large", [content])
    assert not storage.exists("inputs/large")
    storage.write("inputs/large", [content])
    assert b"".join(storage.chunks("inputs/large")) == content
