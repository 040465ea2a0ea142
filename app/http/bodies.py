"""Bodies of requests: none that is compressed is read, and none of an upload that trickles."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from anyio import current_time, fail_after, from_thread
from starlette.datastructures import Headers

from app.errors import Stalled

WAIT_S = 30.0  # that we wait for the next LEAST_BYTES; what we do with them is not counted
LEAST_BYTES = 1 << 16


def are_compressed(headers: Headers) -> bool:
    """Return whether a request's headers say that its body is compressed."""
    return headers.get("content-encoding", "identity").lower() != "identity"


def chunks(stream: AsyncIterator[bytes]) -> Iterator[bytes]:
    """Yield a request's body in chunks, from a worker thread; raise 408 when it arrives too slowly."""
    waited_s, brought = 0.0, 0

    async def fetch() -> bytes | None:
        nonlocal waited_s
        began = current_time()
        try:
            with fail_after(WAIT_S - waited_s):
                return await anext(stream, None)
        except TimeoutError:
            message = f"The body comes too slowly: {brought} bytes in {WAIT_S:g} s, at least {LEAST_BYTES} are needed."
            raise Stalled(message) from None
        finally:
            waited_s += current_time() - began

    while (chunk := from_thread.run(fetch)) is not None:
        brought += len(chunk)
        if brought >= LEAST_BYTES:
            waited_s, brought = 0.0, 0
        yield chunk
