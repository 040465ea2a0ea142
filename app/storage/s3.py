"""Store objects in a bucket on Amazon's S3 or a compatible server."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import quote

from boto3.s3.transfer import TransferConfig
from botocore.exceptions import BotoCoreError, ClientError, IncompleteReadError

from app.storage.base import (
    CHUNK_BYTES,
    Digest,
    ListedObject,
    ObjectMissing,
    StorageError,
    StorageFull,
    StoredObject,
    check_key,
    is_key,
    read_file,
    save_file,
)

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef, CopySourceTypeDef
from dataclasses import dataclass
from typing import TYPE_CHECKING

import boto3
from botocore.config import Config

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef, CopySourceTypeDef


PART_BYTES = 16 << 20  # with S3's limit of 10,000 parts: 160 GB
_WHOLE = TransferConfig(multipart_threshold=5 << 30, multipart_chunksize=1 << 30)  # S3 copies 5 GiB in one request
_MISSING = {"NoSuchKey", "NotFound", "404"}
_FULL = {"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "507"}


class S3Storage:
    """Objects named prefix plus key. An object appears only when its last part has arrived."""

    def __init__(
        self, client: S3Client, bucket: str, prefix: str = "", read_attempts: int = 4, links: S3Client | None = None
    ) -> None:
        self._client = client
        self._links = links or client  # signs links only, without requests
        self._read_attempts = read_attempts
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""

    def write(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        """Send small objects in one request, larger ones in parts; a failed multipart upload is aborted."""
        name, digest = self._name(key), Digest()
        parts = _parts(digest.count_chunks(chunks))
        first = next(parts)
        # A multipart upload takes three requests at least; most objects fit into one part.
        if len(first) < PART_BYTES:
            with _as_storage_error(key):
                self._client.put_object(Bucket=self._bucket, Key=name, Body=first)
        else:
            self._write_parts(key, first, parts)
        return digest.result()

    @contextmanager
    def open(self, key: str) -> Iterator[BinaryIO]:
        """Open the object as a forward-only stream."""
        self.size(key)  # raise for a missing object now, not at the first read
        with io.BufferedReader(_Reader(self.chunks(key)), CHUNK_BYTES) as file:
            yield file

    def chunks(self, key: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield the bytes of a range; if a connection is lost within the body, resume from that point.

        Raises `StorageError` after several losses in a row that brought no byte further.
        """
        size = self.size(key)
        end = size if end is None else min(end, size)
        failures = 0
        while start < end:
            before = start
            try:
                for chunk in self._body(key, start, end):
                    start += len(chunk)
                    yield chunk
                # A body that ends without a byte and without an error counts as a failure, or this loop never ends.
                if start == before:
                    raise IncompleteReadError(actual_bytes=0, expected_bytes=end - start)
            except BotoCoreError as error:
                failures = 1 if start > before else failures + 1
                if failures == self._read_attempts:
                    raise StorageError(
                        f"The storage broke off {failures} times in a row while sending {key}."
                    ) from error

    def size(self, key: str) -> int:
        """Return the object's length in bytes, by a HEAD request."""
        with _as_storage_error(key):
            return self._client.head_object(Bucket=self._bucket, Key=self._name(key))["ContentLength"]

    def exists(self, key: str) -> bool:
        """Return True if the bucket has the object; raise if the bucket does not answer."""
        try:
            self.size(key)
        except ObjectMissing:
            return False
        return True

    def delete(self, key: str) -> None:
        """Delete the object; a missing object is not an error."""
        with _as_storage_error(key):
            self._client.delete_object(Bucket=self._bucket, Key=self._name(key))

    def delete_prefix(self, prefix: str) -> None:
        """Delete with one request per object: the batch call needs checksums that some servers lack."""
        with _as_storage_error(prefix):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._bucket, Prefix=f"{self._name(prefix)}/"):
                for item in page.get("Contents", []):
                    self._client.delete_object(Bucket=self._bucket, Key=item["Key"])

    def move(self, key: str, to: str) -> None:
        """Copy within the bucket, then delete the original; both exist for a moment."""
        with _as_storage_error(key):
            source: CopySourceTypeDef = {"Bucket": self._bucket, "Key": self._name(key)}
            self._client.copy(source, self._bucket, self._name(to), Config=_WHOLE)
            self._client.delete_object(Bucket=self._bucket, Key=self._name(key))

    def list(self, prefix: str = "") -> Iterator[ListedObject]:
        """List the objects in the bucket's order, requesting one page at a time."""
        with _as_storage_error(prefix):
            below = f"{self._name(prefix)}/" if prefix else self._prefix
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=below):
                for item in page.get("Contents", []):
                    key = item["Key"].removeprefix(self._prefix)
                    if is_key(key):
                        yield ListedObject(key, item["Size"], item["LastModified"])

    def clear_unfinished(self, before: datetime, is_ours: Callable[[str], bool]) -> int:
        """Abort old multipart uploads of ours, which a bucket otherwise stores and charges for forever."""
        cleared = 0
        with _as_storage_error("unfinished writes"):
            pages = self._client.get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix):
                for found in page.get("Uploads", []):
                    if found["Initiated"] < before and is_ours(found["Key"].removeprefix(self._prefix)):
                        self._client.abort_multipart_upload(
                            Bucket=self._bucket, Key=found["Key"], UploadId=found["UploadId"]
                        )
                        cleared += 1
        return cleared

    def keeps_deleted(self) -> bool:
        """Return True if the bucket keeps deleted objects as old versions; False if it does not say."""
        with suppress(BotoCoreError, ClientError):
            return self._client.get_bucket_versioning(Bucket=self._bucket).get("Status") == "Enabled"
        return False

    def presigned_url(self, key: str, filename: str, ttl_s: int) -> str | None:
        """Sign a link with the customers' address of the server; no request is made."""
        return self._links.generate_presigned_url(
            "get_object",
            Params={
                "Bucket": self._bucket,
                "Key": self._name(key),
                "ResponseContentDisposition": f"attachment; filename*=UTF-8''{quote(filename, safe='')}",
            },
            ExpiresIn=ttl_s,
        )

    def upload_file(self, key: str, path: Path) -> StoredObject:
        """Send a file as `write` does."""
        return self.write(key, read_file(path))

    def download_file(self, key: str, path: Path) -> StoredObject:
        """Fetch an object to a file that appears whole or not at all."""
        return save_file(self.chunks(key), path)

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

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
        # Whatever the reason: a bucket stores, and charges for, the parts of an upload that is never completed.
        except BaseException:
            with suppress(BotoCoreError, ClientError):  # report the first failure
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=name, UploadId=upload)
            raise

    def _write_part(self, key: str, upload: str, number: int, part: bytes) -> CompletedPartTypeDef:
        with _as_storage_error(key):
            answer = self._client.upload_part(
                Bucket=self._bucket, Key=self._name(key), UploadId=upload, PartNumber=number, Body=part
            )
        return {"ETag": answer["ETag"], "PartNumber": number}


class _Reader(io.RawIOBase):
    """A raw binary stream that reads from an iterator of chunks, for callers that read lines."""

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
    """Yield the same bytes in parts of PART_BYTES; the last one is shorter, and may be empty."""
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


# Create S3 clients with bounded waits and settings for servers other than Amazon's.


@dataclass(frozen=True, slots=True)
class Patience:
    """Timeouts in seconds, and the number of attempts, for a server that does not answer."""

    connect_s: float = 5
    read_s: float = 30
    attempts: int = 4


PATIENT = Patience()
QUICK = Patience(connect_s=2, read_s=5, attempts=2)  # for reads while a client waits for the answer


def s3_client(endpoint_url: str | None, patience: Patience = PATIENT) -> S3Client:
    """Return a client with bounded waits and retries; boto3 finds the credentials in the environment."""
    session = boto3.session.Session()
    config = Config(
        signature_version="s3v4",
        s3={"addressing_style": "path" if endpoint_url else "auto"},
        request_checksum_calculation="when_required",  # other servers do not support the newer checksum trailers
        response_checksum_validation="when_required",
        retries={"mode": "standard", "total_max_attempts": patience.attempts},
        connect_timeout=patience.connect_s,
        read_timeout=patience.read_s,
        max_pool_connections=64,
    )
    region = session.region_name or "us-east-1"
    return session.client("s3", endpoint_url=endpoint_url, region_name=region, config=config)
