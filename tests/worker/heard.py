"""What a child says and leaves, as tests read it."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from worker.protocol import Message, parse
from worker.results import seal
from worker.workdir import Folder

KEY = Ed25519PrivateKey.generate()

Work = Callable[..., None]


class Heard:
    """A report whose messages are kept, each after the journey through a line of JSON."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_CREAT | os.O_WRONLY)

    @property
    def messages(self) -> list[Message]:
        found = [parse(line) for line in self.path.read_bytes().splitlines()]
        return [message for message in found if message]

    def of_kind(self, kind: str) -> list[Message]:
        return [message for message in self.messages if message["kind"] == kind]


def read_report(folder: Folder) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(folder.safety.read_text())
    return report


def unpack_archive(folder: Folder, to: Path) -> Path:
    """What a customer has after unpacking the archive."""
    seal(folder, KEY, "ftjob-1")
    with tarfile.open(folder.archive) as tar:
        tar.extractall(to, filter="data")
    return to / "ftjob-1-adapter"
