"""Read request bodies: refuse compressed ones, and time out slow ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from anyio import current_time, fail_after, from_thread
from starlette.datastructures import Headers
from starlette.types import Message, Receive

from app.errors import Stalled

WAIT_S = 30.0  # for the next LEAST_BYTES to arrive; our own processing does not count
LEAST_BYTES = 1 << 16


def are_compressed(headers: Headers) -> bool:
    """Return True if a request's headers declare a compressed body."""
    return headers.get("content-encoding", "identity").lower() != "identity"


def limit_pace(receive: Receive) -> Receive:
    """Return a `receive` that raises `Stalled` (408) if a body arrives too slowly; no limit applies after its end."""
    waited_s, brought, is_whole = 0.0, 0, False

    async def receive_in_time() -> Message:
        nonlocal waited_s, brought, is_whole
        if is_whole:
            return await receive()
        began = current_time()
        try:
            # Only the time within `receive` counts: a slow storage on our side must not time out the client.
            with fail_after(WAIT_S - waited_s):
                message = await receive()
        except TimeoutError:
            text = f"The body comes too slowly: {brought} bytes in {WAIT_S:g} s, at least {LEAST_BYTES} are needed."
            raise Stalled(text) from None
        waited_s += current_time() - began
        brought += len(message.get("body", b""))
        if brought >= LEAST_BYTES:
            waited_s, brought = 0.0, 0
        is_whole = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    return receive_in_time


def chunks(stream: AsyncIterator[bytes]) -> Iterator[bytes]:
    """Yield a request's body in chunks; call it from a worker thread."""

    async def fetch() -> bytes | None:
        return await anext(stream, None)

    while (chunk := from_thread.run(fetch)) is not None:
        yield chunk
