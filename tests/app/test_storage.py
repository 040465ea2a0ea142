"""What every storage keeps to, tried on a folder and on two S3 servers."""

from __future__ import annotations

import hashlib
import os
import re
import resource
import signal
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain, cycle, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.exceptions import IncompleteReadError

from app.storage import LocalStorage, ObjectMissing, Storage, StorageError, StorageFull, StoredObject, open_storage
from app.storage.s3 import PART_BYTES, S3Storage
from tests import servers
from tests.place import Place

KEY = "tenants/org-1/files/file-1"


def test_what_is_written_is_read_back(storage: Storage) -> None:
    storage.write(KEY, [b"one", b"", b"two"])
    assert b"".join(storage.chunks(KEY)) == b"onetwo"


def test_a_write_tells_size_and_digest(storage: Storage) -> None:
    assert storage.write(KEY, [b"one", b"two"]) == StoredObject(6, hashlib.sha256(b"onetwo").hexdigest())


def test_an_object_may_be_empty(storage: Storage) -> None:
    storage.write(KEY, [])
    assert (storage.size(KEY), b"".join(storage.chunks(KEY))) == (0, b"")


def test_a_range_is_half_open(storage: Storage) -> None:
    storage.write(KEY, [b"0123456789"])
    assert [b"".join(storage.chunks(KEY, *ends)) for ends in [(2, 5), (8, None), (8, 99), (5, 5)]] == [
        b"234",
        b"89",
        b"89",
        b"",
    ]


def test_an_object_reads_as_a_file_of_lines(storage: Storage) -> None:
    storage.write(KEY, [b"one\ntw", b"o\nthree"])
    with storage.open(KEY) as file:
        assert list(file) == [b"one\n", b"two\n", b"three"]


@pytest.mark.parametrize("size", [PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES])
def test_an_object_of_several_parts_is_whole(storage: Storage, size: int) -> None:
    block = os.urandom(1 << 20)
    blocks = [block] * (size >> 20) + [block[: size % (1 << 20)]]
    stored = storage.write(KEY, blocks)
    digest = hashlib.sha256()
    for chunk in storage.chunks(KEY):
        digest.update(chunk)
    assert stored == StoredObject(size, digest.hexdigest())


def test_a_write_that_is_cut_off_leaves_nothing(storage: Storage) -> None:
    with pytest.raises(ConnectionResetError):
        storage.write(KEY, _broken_chunks())
    assert not storage.exists(KEY)


def test_a_write_that_is_cut_off_keeps_the_object_that_was(storage: Storage) -> None:
    storage.write(KEY, [b"old"])
    with pytest.raises(ConnectionResetError):
        storage.write(KEY, _broken_chunks())
    assert b"".join(storage.chunks(KEY)) == b"old"


def test_a_missing_object_is_named(storage: Storage) -> None:
    with pytest.raises(ObjectMissing, match=KEY):
        storage.size(KEY)
    with pytest.raises(ObjectMissing, match=KEY), storage.open(KEY):
        pass
    with pytest.raises(ObjectMissing, match=KEY):
        next(storage.chunks(KEY))


def test_deleting_twice_is_harmless(storage: Storage) -> None:
    storage.write(KEY, [b"one"])
    storage.delete(KEY)
    storage.delete(KEY)
    assert not storage.exists(KEY)


def test_deleting_a_prefix_spares_its_neighbors(storage: Storage) -> None:
    for key in ("jobs/1/a", "jobs/1/b/c", "jobs/10/a"):
        storage.write(key, [b"x"])
    storage.delete_prefix("jobs/1")
    assert [storage.exists(key) for key in ("jobs/1/a", "jobs/1/b/c", "jobs/10/a")] == [False, False, True]


def test_deleting_a_prefix_that_is_not_there_is_harmless(storage: Storage) -> None:
    storage.delete_prefix("jobs/1")


def test_a_moved_object_is_at_its_new_key_alone(storage: Storage) -> None:
    storage.write(KEY, [b"moved"])
    storage.move(KEY, f"aside/2026-11-22/{KEY}")
    assert b"".join(storage.chunks(f"aside/2026-11-22/{KEY}")) == b"moved"
    assert not storage.exists(KEY)
    with pytest.raises(ObjectMissing, match=KEY):
        storage.move(KEY, "elsewhere")


def test_a_listing_tells_key_size_and_time_of_what_is_below_a_prefix(storage: Storage) -> None:
    assert [*storage.list(), *storage.list("jobs")] == []
    for key in ("jobs/1/a", "jobs/1/b/c", "jobs/10/a"):
        storage.write(key, [key.encode()])
    found = {item.key: item for item in storage.list()}
    assert {key: item.bytes for key, item in found.items()} == {"jobs/1/a": 8, "jobs/1/b/c": 10, "jobs/10/a": 9}
    assert {item.key for item in storage.list("jobs/1")} == {"jobs/1/a", "jobs/1/b/c"}
    age = datetime.now(UTC) - found["jobs/1/a"].modified_at
    assert abs(age) < timedelta(hours=1)


def test_a_listing_of_many_pages_is_whole(moto_place: Place) -> None:
    storage = _open_place(moto_place)
    for i in range(1_003):
        storage.write(f"many/{i}", [])
    assert len(list(storage.list("many"))) == 1_003


def test_other_names_than_our_keys_are_not_listed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "objects")
    storage.write(KEY, [b"x"])
    (tmp_path / "objects" / "a name with spaces").write_text("x")
    (tmp_path / "objects" / "link").symlink_to(tmp_path)
    assert [item.key for item in storage.list()] == [KEY]


def test_old_leftovers_of_killed_writes_in_a_folder_are_cleared(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "objects")
    (tmp_path / "objects" / ".aside" / "left").write_text("half an object")
    now = datetime.now(UTC)
    assert storage.clear_unfinished(now - timedelta(days=1), lambda key: True) == 0
    assert storage.clear_unfinished(now + timedelta(days=1), lambda key: True) == 1
    assert list((tmp_path / "objects" / ".aside").iterdir()) == []


def test_old_uploads_in_parts_to_a_bucket_are_aborted_if_they_are_ours(rclone_place: Place) -> None:
    bucket = urlsplit(rclone_place.url).netloc
    client = boto3.client("s3", endpoint_url=rclone_place.endpoint_url, region_name="us-east-1")
    for key in ("spard/ours", "spard/theirs", "elsewhere/ours"):
        client.create_multipart_upload(Bucket=bucket, Key=key)
    storage, now = _open_place(rclone_place), datetime.now(UTC)
    assert storage.clear_unfinished(now - timedelta(days=1), lambda key: True) == 0
    assert storage.clear_unfinished(now + timedelta(days=1), lambda key: key == "ours") == 1
    left = client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    client.close()
    assert {item["Key"] for item in left} == {"spard/theirs", "elsewhere/ours"}


def test_files_go_up_and_come_down_the_same(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "up").write_bytes(b"some bytes")
    assert storage.upload_file(KEY, tmp_path / "up") == storage.download_file(KEY, tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == b"some bytes"


@pytest.mark.parametrize("key", ["", "/etc/passwd", "a/../b", "..", "a//b", "a/", ".aside/x", "a\\b", "a\0b", "a b\n"])
def test_a_key_that_we_would_not_make_is_refused(storage: Storage, key: str) -> None:
    with pytest.raises(ValueError, match="not a storage key"):
        storage.write(key, [b"x"])
    with pytest.raises(ValueError, match="not a storage key"):
        next(storage.chunks(key))
    with pytest.raises(ValueError, match="not a storage key"):
        storage.delete_prefix(key)


@pytest.mark.parametrize("server", ["moto", "rclone"])
def test_a_presigned_url_serves_the_object_under_its_name(server: str, request: pytest.FixtureRequest) -> None:
    storage = _open_place(request.getfixturevalue(f"{server}_place"))
    storage.write(KEY, [b"some bytes"])
    url = storage.presigned_url(KEY, 'my "adapter".tar.gz', 60)
    assert url
    with urllib.request.urlopen(url) as answer:  # noqa: S310 - our own server
        assert answer.read() == b"some bytes"


def test_a_presigned_url_is_for_its_key_only(rclone_place: Place) -> None:
    storage = _open_place(rclone_place)
    storage.write(KEY, [b"mine"])
    storage.write(f"{KEY}0", [b"not mine"])
    url = storage.presigned_url(KEY, "mine", 60)
    assert url
    with pytest.raises(urllib.request.HTTPError, match="403"):
        urllib.request.urlopen(url.replace(KEY, f"{KEY}0"))  # noqa: S310 - our own server


def test_a_presigned_url_is_for_one_verb_and_for_its_time(rclone_place: Place) -> None:
    storage = _open_place(rclone_place)
    storage.write(KEY, [b"mine"])
    url, short = storage.presigned_url(KEY, "mine", 60), storage.presigned_url(KEY, "mine", 1)
    assert url
    assert short
    time.sleep(2.1)
    longer = re.sub(r"Expires=(\d+)", r"Expires=9\1", url)
    for odd, verb in ((url, "PUT"), (url, "DELETE"), (short, "GET"), (longer, "GET"), (url.partition("?")[0], "GET")):
        with pytest.raises(urllib.request.HTTPError, match=r"40[03]"):
            urllib.request.urlopen(urllib.request.Request(odd, method=verb))  # noqa: S310 - our own server
    assert b"".join(storage.chunks(KEY)) == b"mine"


def test_a_folder_signs_no_urls(local_place: Place) -> None:
    assert _open_place(local_place).presigned_url(KEY, "name", 60) is None


def test_a_link_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    storage = LocalStorage(tmp_path / "objects")
    (tmp_path / "objects" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "objects" / "folder").symlink_to(tmp_path)
    with pytest.raises(StorageError):
        next(storage.chunks("link"))
    with pytest.raises(ValueError, match="not inside"):
        next(storage.chunks("folder/secret"))


def test_only_this_user_can_read_the_folder(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "objects")
    storage.write(KEY, [b"x"])
    modes = [path.stat().st_mode & 0o077 for path in (tmp_path / "objects", tmp_path / "objects" / KEY)]
    assert modes == [0, 0]


@pytest.mark.parametrize("last", [1 << 20, 1])  # one that does not fit is noticed when it is written, or flushed
def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, last: int) -> None:
    storage = LocalStorage(tmp_path / "objects")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        with pytest.raises(StorageFull):
            storage.write(KEY, [bytes(1 << 20), bytes(last)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert [path for path in (tmp_path / "objects").rglob("*") if path.is_file()] == []


def test_a_server_that_does_not_answer_is_a_storage_error(s3_credentials: None) -> None:
    storage = open_storage("s3://bucket", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="does not answer"):
        storage.write(KEY, [b"x"])


def test_a_wrong_secret_is_a_storage_error(rclone_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(StorageError, match="refused"):
        _open_place(rclone_place).write(KEY, [b"x"])


def test_a_read_goes_on_where_the_connection_broke(moto_place: Place) -> None:
    data = os.urandom(3 << 20)
    _open_place(moto_place).write(KEY, [data])
    with servers.cutting_proxy(moto_place.endpoint_url or "", after_bytes=1 << 20, cuts=2) as url:
        assert b"".join(open_storage(moto_place.url, url).chunks(KEY)) == data


class BreakingBucket:
    """A stand-in for a bucket that breaks off each answer after a few bytes."""

    def __init__(self, data: bytes, passed: Iterator[int]) -> None:
        self._data, self._passed = data, passed

    def head_object(self, **_: str) -> dict[str, Any]:
        return {"ContentLength": len(self._data)}

    def get_object(self, Range: str, **_: str) -> dict[str, Any]:
        start = int(Range.removeprefix("bytes=").partition("-")[0])
        return {"Body": SimpleNamespace(iter_chunks=partial(self._send, start, next(self._passed)), close=lambda: None)}

    def _send(self, start: int, count: int, _: int) -> Iterator[bytes]:
        if count:
            yield self._data[start : start + count]
        raise IncompleteReadError(actual_bytes=count, expected_bytes=len(self._data))


def test_a_read_that_breaks_again_and_again_goes_on_while_it_gets_further() -> None:
    data, lost_twice = os.urandom(20), cycle([2, 0, 0])
    bucket: Any = BreakingBucket(data, lost_twice)
    assert b"".join(S3Storage(bucket, "bucket", read_attempts=4).chunks(KEY)) == data


def test_a_read_that_breaks_at_the_same_byte_every_time_is_given_up() -> None:
    bucket: Any = BreakingBucket(bytes(20), chain([2, 2], repeat(0)))
    with pytest.raises(StorageError, match="broke off 4 times in a row"):
        list(S3Storage(bucket, "bucket", read_attempts=4).chunks(KEY))


@pytest.mark.parametrize("url", ["folder", "file://host/folder", "s3://", "http://host/bucket"])
def test_an_unknown_place_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="A storage is"):
        open_storage(url)


def _open_place(place: Place) -> Storage:
    return open_storage(place.url, place.endpoint_url)


def _broken_chunks() -> Iterator[bytes]:
    yield bytes(PART_BYTES + 1)
    raise ConnectionResetError
