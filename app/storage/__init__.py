"""Where large things live: one interface over a local folder and over S3."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from app.storage.base import ObjectMissing, Storage, StorageError, StorageFull, Stored
from app.storage.local import LocalStorage
from app.storage.s3 import S3Storage, s3_client

__all__ = [
    "LocalStorage",
    "ObjectMissing",
    "S3Storage",
    "Storage",
    "StorageError",
    "StorageFull",
    "Stored",
    "open_storage",
]


def open_storage(url: str, endpoint_url: str | None = None) -> Storage:
    """The storage at `file:///folder` or `s3://bucket/prefix`; `endpoint_url` names an S3 that is not Amazon's."""
    parts = urlsplit(url)
    match parts.scheme:
        case "file" if parts.path.startswith("/") and not parts.netloc:
            return LocalStorage(Path(unquote(parts.path)))
        case "s3" if parts.netloc:
            return S3Storage(s3_client(endpoint_url), parts.netloc, parts.path.strip("/"))
        case _:
            raise ValueError(f"A storage is file:///folder or s3://bucket/prefix, not {url!r}.")
