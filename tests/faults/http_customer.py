"""A customer of an API that may be away: uploads, also such as break off, and streams that are opened and left."""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import Any
from urllib.parse import urlsplit

import httpx2

from tests.app.http.conftest import FILES, rows

ROWS = 200
_PATIENCE_S = 60.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: what was not sent is thrown away, and the peer is told so


class HttpCustomer:
    """Holds a key; `files` are the digests of the files that the API said it has, by id.

    `refused` are those of files that it did not take; where the answer to its COMMIT was lost it may have them.
    """

    def __init__(self, url: str, secret: str) -> None:
        self.files: dict[str, str] = {}
        self.refused: set[str] = set()
        self._head = {"authorization": f"Bearer {secret}"}
        self._url, self._where = url, urlsplit(url)
        self._sent = 0

    def upload(self) -> int:
        """Send a file that is right; return the status of the answer."""
        content = self._content()
        with httpx2.Client(headers=self._head, timeout=_PATIENCE_S) as client:
            answer = client.post(self._url + FILES, **_form(content))
        if answer.status_code == 200:
            self.files[answer.json()["id"]] = sha256(content).hexdigest()
        else:
            self.refused.add(sha256(content).hexdigest())
        return answer.status_code

    @contextmanager
    def half_an_upload(self) -> Iterator[None]:
        """Send half of a file, and no more inside the block."""
        request = httpx2.Request("POST", self._url + FILES, headers=self._head, **_form(self._content()))
        head = [f"POST {FILES} HTTP/1.1", *(f"{name}: {value}" for name, value in request.headers.items())]
        whole = "\r\n".join([*head, "", ""]).encode() + request.read()
        with self._connect() as connection:
            connection.sendall(whole[: len(whole) // 2])
            yield

    def open_streams(self, job_id: str, number: int) -> list[socket.socket]:
        """Ask for a job's stream so often; return the connections that get one."""
        asked = [self._connect() for _ in range(number)]
        head = "".join(f"{name}: {value}\r\n" for name, value in self._head.items())
        for connection in asked:
            connection.sendall(f"GET {_stream(job_id)} HTTP/1.1\r\nhost: x\r\n{head}\r\n".encode())
        return [connection for connection in asked if _begins_well(connection)]

    def read_stream(self, job_id: str) -> list[int]:
        """Return the numbers of the events of a job that has ended, as its stream has them."""
        with httpx2.Client(headers=self._head, timeout=_PATIENCE_S) as client:
            answer = client.get(self._url + _stream(job_id))
        assert answer.status_code == 200, answer.text
        return [int(number) for number in re.findall(r"^id: (\d+)", answer.text, re.MULTILINE)]

    def list_files(self) -> dict[str, str]:
        """Return the digests of the files that the API lists, of their bytes as it sends them."""
        with httpx2.Client(headers=self._head, timeout=_PATIENCE_S) as client:
            listed = client.get(self._url + FILES, params={"purpose": "fine-tune", "limit": 10_000}).json()["data"]
            answers = {each["id"]: client.get(f"{self._url}{FILES}/{each['id']}/content") for each in listed}
        assert {answer.status_code for answer in answers.values()} == {200}, [
            each.text[:300] for each in answers.values()
        ]
        return {file_id: sha256(answer.content).hexdigest() for file_id, answer in answers.items()}

    def _connect(self) -> socket.socket:
        return socket.create_connection((self._where.hostname or "", self._where.port or 0), timeout=_PATIENCE_S)

    def _content(self) -> bytes:
        self._sent += 1
        return rows(ROWS + self._sent)


def leave(connections: Sequence[socket.socket]) -> None:
    """Close connections, every second one without a farewell."""
    for i, connection in enumerate(connections):
        if i % 2:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        connection.close()


def _begins_well(connection: socket.socket) -> bool:
    begun = b""
    with suppress(OSError):
        begun = connection.recv(15)
    if begun != b"HTTP/1.1 200 OK":
        connection.close()
    return begun == b"HTTP/1.1 200 OK"


def _form(content: bytes) -> dict[str, Any]:
    return {"data": {"purpose": "fine-tune"}, "files": {"file": ("train.jsonl", content)}}


def _stream(job_id: str) -> str:
    return f"/v1/fine_tuning/jobs/{job_id}/stream"
