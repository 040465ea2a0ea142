"""Objects in a bucket, on Amazon's S3 or on any server that speaks it."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import quote

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from app.storage.base import (
    CHUNK_BYTES,
    Digest,
    ObjectMissing,
    StorageError,
    StorageFull,
    Stored,
    checked,
    read_file,
    save_file,
)

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

PART_BYTES = 16 << 20  # 10,000 parts of it make 160 GB
_READ_ATTEMPTS = 4
_MISSING = {"NoSuchKey", "NotFound", "404"}
_FULL = {"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "507"}


def s3_client(endpoint_url: str | None) -> S3Client:
    """A client with bounded waits and retries; credentials come from the environment, as boto3 finds them."""
    session = boto3.session.Session()
    config = Config(
        signature_version="s3v4",
        s3={"addressing_style": "path" if endpoint_url else "auto"},
        request_checksum_calculation="when_required",  # servers other than Amazon's do not know the newer trailers
        response_checksum_validation="when_required",
        retries={"mode": "standard", "total_max_attempts": 4},
        connect_timeout=5,
        read_timeout=30,
        max_pool_connections=32,
    )
    region = session.region_name or "us-east-1"
    return session.client("s3", endpoint_url=endpoint_url, region_name=region, config=config)


class S3Storage:
    """A key is an object's name after the prefix. An object appears when its last part is in, never before."""

    def __init__(self, client: S3Client, bucket: str, prefix: str = "") -> None:
        self._client = client
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""

    def write(self, key: str, chunks: Iterable[bytes]) -> Stored:
        name, digest = self._name(key), Digest()
        parts = _parts(digest.through(chunks))
        first = next(parts)
        if len(first) < PART_BYTES:
            with _as_storage_error(key):
                self._client.put_object(Bucket=self._bucket, Key=name, Body=first)
        else:
            self._write_parts(key, first, parts)
        return digest.stored()

    @contextmanager
    def open(self, key: str) -> Iterator[BinaryIO]:
        self.size(key)  # a missing object is known now, not at the first read
        with io.BufferedReader(_Reader(self.chunks(key)), CHUNK_BYTES) as file:
            yield file

    def chunks(self, key: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Read on from where it broke off when a connection is lost within the body."""
        size = self.size(key)
        end = size if end is None else min(end, size)
        failures = 0
        while start < end:
            try:
                for chunk in self._body(key, start, end):
                    start += len(chunk)
                    yield chunk
            except BotoCoreError as error:
                failures += 1
                if failures == _READ_ATTEMPTS:
                    raise StorageError(f"The storage broke off {failures} times while sending {key}.") from error

    def size(self, key: str) -> int:
        with _as_storage_error(key):
            return self._client.head_object(Bucket=self._bucket, Key=self._name(key))["ContentLength"]

    def exists(self, key: str) -> bool:
        try:
            self.size(key)
        except ObjectMissing:
            return False
        return True

    def delete(self, key: str) -> None:
        with _as_storage_error(key):
            self._client.delete_object(Bucket=self._bucket, Key=self._name(key))

    def delete_prefix(self, prefix: str) -> None:
        """One request for each object: the batch call needs checksums that not every server takes."""
        with _as_storage_error(prefix):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._bucket, Prefix=f"{self._name(prefix)}/"):
                for item in page.get("Contents", []):
                    self._client.delete_object(Bucket=self._bucket, Key=item["Key"])

    def presigned_url(self, key: str, filename: str, ttl_s: int) -> str | None:
        return self._client.generate_presigned_url(
            "get_object",
            Params={
                "Bucket": self._bucket,
                "Key": self._name(key),
                "ResponseContentDisposition": f"attachment; filename*=UTF-8''{quote(filename, safe='')}",
            },
            ExpiresIn=ttl_s,
        )

    def upload_file(self, key: str, path: Path) -> Stored:
        return self.write(key, read_file(path))

    def download_file(self, key: str, path: Path) -> Stored:
        return save_file(self.chunks(key), path)

    def _name(self, key: str) -> str:
        return self._prefix + checked(key)

    def _body(self, key: str, start: int, end: int) -> Iterator[bytes]:
        with _as_storage_error(key):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._name(key), Range=f"bytes={start}-{end - 1}")
        body = answer["Body"]
        try:
            yield from body.iter_chunks(CHUNK_BYTES)
        finally:
            body.close()

    def _write_parts(self, key: str, first: bytes, rest: Iterator[bytes]) -> None:
        name = self._name(key)
        with _as_storage_error(key):
            upload = self._client.create_multipart_upload(Bucket=self._bucket, Key=name)["UploadId"]
        try:
            done = [self._write_part(key, upload, 1, first)]
            done += [self._write_part(key, upload, number, part) for number, part in enumerate(filter(None, rest), 2)]
            with _as_storage_error(key):
                self._client.complete_multipart_upload(
                    Bucket=self._bucket, Key=name, UploadId=upload, MultipartUpload={"Parts": done}
                )
        except BaseException:
            with suppress(BotoCoreError, ClientError):  # the first failure is the one to tell
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=name, UploadId=upload)
            raise

    def _write_part(self, key: str, upload: str, number: int, part: bytes) -> CompletedPartTypeDef:
        with _as_storage_error(key):
            answer = self._client.upload_part(
                Bucket=self._bucket, Key=self._name(key), UploadId=upload, PartNumber=number, Body=part
            )
        return {"ETag": answer["ETag"], "PartNumber": number}


class _Reader(io.RawIOBase):
    """A file over chunks, for what wants to read lines."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer)
        self._rest = self._rest or next(self._chunks, b"")
        taken = self._rest[: len(view)]
        view[: len(taken)] = taken
        self._rest = self._rest[len(taken) :]
        return len(taken)


def _parts(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in parts of PART_BYTES, the last one shorter and, when nothing is left, empty."""
    part = bytearray()
    for chunk in chunks:
        part += chunk
        while len(part) >= PART_BYTES:
            yield bytes(part[:PART_BYTES])
            del part[:PART_BYTES]
    yield bytes(part)


@contextmanager
def _as_storage_error(key: str) -> Iterator[None]:
    try:
        yield
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        if code in _MISSING:
            raise ObjectMissing(f"The object {key} is missing.") from error
        if code in _FULL:
            raise StorageFull(f"No room is left to store {key}.") from error
        raise StorageError(f"The storage refused {key}: {code or 'no reason given'}.") from error
    except BotoCoreError as error:
        raise StorageError(f"The storage does not answer: {type(error).__name__}.") from error
