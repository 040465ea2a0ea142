"""Sign a result: `result.json`, and beside it an Ed25519 signature of its bytes.

The keys are those that sign adapters (`spard.release.keys`). A signature proves the signer and that nothing changed
since; only running the command again proves that the figures were measured as stated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from spard.errors import NotProved
from spard.release.manifest import check, sign_bytes
from spard_lab.bench.store import write_aside

RESULT, SIGNATURE = "result.json", "result.sig"


def write_result(folder: Path, result: Mapping[str, Any], key: Ed25519PrivateKey | None) -> None:
    """Write the result, signed if there is a key; the signature of an earlier result is removed."""
    text = json.dumps(result, indent=1) + "\n"
    write_aside(folder / RESULT, text)
    (folder / SIGNATURE).unlink(missing_ok=True)
    if key is not None:
        write_aside(folder / SIGNATURE, json.dumps(sign_bytes(text.encode(), key), indent=2) + "\n")


def read_result(folder: Path, public: Ed25519PublicKey | None) -> tuple[dict[str, Any], str]:
    """Return a result and the id of the key that signed it.

    Raises `NotProved` unless there is a valid signature of these bytes, by `public` if it is given.
    """
    try:
        content, signature = (folder / RESULT).read_bytes(), (folder / SIGNATURE).read_bytes()
    except OSError as error:
        raise NotProved(f"{error.filename} cannot be read: {error.strerror}.") from error
    key_id = check(content, signature, public, RESULT)
    found: dict[str, Any] = json.loads(content)
    return found, key_id
