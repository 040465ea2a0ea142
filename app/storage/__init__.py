"""Store large objects: one interface for a local folder and for S3."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from app.storage.base import ListedObject, ObjectMissing, Storage, StorageError, StorageFull, StoredObject
from app.storage.local import LocalStorage
from app.storage.s3 import PATIENT, QUICK, Patience, S3Storage, s3_client

__all__ = [
    "PATIENT",
    "QUICK",
    "ListedObject",
    "LocalStorage",
    "ObjectMissing",
    "Patience",
    "S3Storage",
    "Storage",
    "StorageError",
    "StorageFull",
    "StoredObject",
    "open_storage",
]


def open_storage(
    url: str,
    endpoint_url: str | None = None,
    public_endpoint_url: str | None = None,
    patience: Patience = PATIENT,
) -> Storage:
    """Open the storage at `file:///folder` or `s3://bucket/prefix`.

    `endpoint_url` is the address of an S3 server other than Amazon's. Links use `public_endpoint_url`, where customers
    reach the same server, by default `endpoint_url`. Raises `ValueError` for any other URL.
    """
    parts = urlsplit(url)
    match parts.scheme:
        case "file" if parts.path.startswith("/") and not parts.netloc:
            return LocalStorage(Path(unquote(parts.path)))
        case "s3" if parts.netloc:
            return S3Storage(
                s3_client(endpoint_url, patience),
                parts.netloc,
                parts.path.strip("/"),
                patience.attempts,
                links=s3_client(public_endpoint_url) if public_endpoint_url else None,
            )
        case _:
            raise ValueError(f"A storage is file:///folder or s3://bucket/prefix, not {url!r}.")
