"""Fetch the archive of a released model for an engine, checking its digest and its signed manifest."""

from __future__ import annotations

import shutil
from pathlib import Path

from app.errors import Unavailable
from app.inference.released import Archive
from app.settings import Settings
from app.signing import public_keys
from app.storage import ObjectMissing, Storage
from spard.errors import NotProved
from spard.release.archive import unpack
from spard.release.manifest import verify


class NotServed(Unavailable):
    """The bytes of a released model are not the ones that were signed, so nothing is answered with them."""

    code = "model_not_proved"


def fetch(storage: Storage, settings: Settings, archive: Archive, folder: Path) -> str:
    """Download an archive, verify it, unpack it into `folder`, and return the SHA-256 of its manifest.

    `folder` is replaced if it exists. Raises `NotServed` if digest, signature, job or files do not match the release.
    """
    packed = folder.with_name(f"{folder.name}.tar.gz")
    packed.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        stored = storage.download_file(archive.storage_key, packed)
        if stored.sha256 != archive.sha256:
            raise NotServed("The stored adapter is not the one that was released.")
        proved = verify(packed)
        public_keys(settings).require(proved.key_id)
        if proved.manifest.get("job_id") not in (None, archive.job_id):
            raise NotServed("The stored adapter is another job's.")
        unpack(packed, folder)
        # Verified again after unpacking: the engine reads the folder, not the archive.
        if verify(folder).manifest_sha256 != proved.manifest_sha256:
            raise NotServed("The unpacked adapter is not the one that was signed.")
    except NotProved as error:
        raise NotServed(f"The stored adapter is not proved: {error}") from None
    except ObjectMissing:
        raise NotServed("The released adapter is not in the storage.") from None
    finally:
        packed.unlink(missing_ok=True)
    return proved.manifest_sha256
