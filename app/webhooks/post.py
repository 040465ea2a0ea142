"""Send one POST to a checked address, without redirects or proxies and within a fixed time."""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import Timer

from app.webhooks.address import Target

_CONNECT_S = 3.0
_TOTAL_S = 10.0  # also stops a receiver that answers one byte at a time


@dataclass(frozen=True, slots=True)
class Answer:
    """The status and the `retry-after` header of a receiver's answer."""

    status: int
    retry_after: str | None = None


class Unanswered(Exception):
    """Raised if the receiver could not be reached or did not answer in time."""


class _Connection(http.client.HTTPConnection):
    """A connection to the checked address, regardless of what its name resolves to now."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.host, target.port)
        self._target = target

    def connect(self) -> None:
        self.sock = socket.create_connection((self._target.address, self._target.port), _CONNECT_S)
        if self._target.is_tls:
            wrap = ssl.create_default_context().wrap_socket
            # The handshake comes later, in `post`, when the deadline runs already.
            self.sock = wrap(self.sock, server_hostname=self._target.host, do_handshake_on_connect=False)

    def cut(self) -> None:
        with suppress(OSError):
            # The plain socket's method: SSLSocket's own also drops its SSL object, which the other thread may be using.
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


def post(target: Target, body: bytes, headers: Mapping[str, str]) -> Answer:
    """Send a body and return the status and one header of the answer; raise `Unanswered` if there is none."""
    connection = _Connection(target)
    deadline = Timer(_TOTAL_S, connection.cut)
    try:
        connection.connect()
        deadline.start()
        if isinstance(connection.sock, ssl.SSLSocket):
            connection.sock.do_handshake()
        # The connection goes to an address, so the Host header has to name the host.
        host = target.host if target.port in (80, 443) else f"{target.host}:{target.port}"
        named = {"host": host, "content-type": "application/json", "user-agent": "spard-webhooks", **headers}
        connection.request("POST", target.path, body, named)
        answer = connection.getresponse()
        return Answer(answer.status, answer.getheader("retry-after"))
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unanswered(type(error).__name__) from error
    finally:
        deadline.cancel()
        connection.close()
