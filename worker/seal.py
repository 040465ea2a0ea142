"""The last hand on an adapter: its manifest is signed, the folder packed, and the archive read again as anybody may.

The parent does this: the child, which works on strangers' data, never has the key.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from spard.archive import archive
from spard.manifest import sign, verify
from worker.folder import Folder


def seal(folder: Folder, key: Ed25519PrivateKey) -> None:
    """Sign and pack; `NotProved` when the archive is not what the child has described."""
    sign(folder.adapter, key)
    archive(folder.adapter, folder.archive)
    verify(folder.archive, key.public_key())
