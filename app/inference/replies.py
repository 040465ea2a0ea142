"""Take the replies that one HTTP request needs, count what of them is sent, and end each of them with the request.

Take replies only through `RepliesDep`: an entry of the ledger that is never closed keeps its slot for as long as the
process lives, and once the process has ended, `app.inference.lost_calls` bills the request with what the entry counts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from app.errors import AppError
from app.http.delivery import Delivery
from app.inference.protocol import Ask
from app.inference.service import Reply, Serving
from app.keys.service import Principal

Found = TypeVar("Found")


class Replies:
    """The replies of one request; `end` closes those that were opened and their entries in the ledger."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._open: list[Reply] = []

    async def open(self, caller: Principal, name: str, ask: Ask, endpoint: str) -> Reply:
        """Start a reply as `Serving.open` does; it ends with the request at the latest."""
        reply = await self._serving.open(caller, name, ask, endpoint)
        self._open.append(reply)
        return reply

    async def read_whole(self, reply: Reply, answer: Awaitable[Found]) -> Found:
        """Await `answer`, which reads all of a reply, and complete the reply's row; return the answer.

        A reply that fails ends here, as nothing of it is sent.
        """
        is_answered = False
        try:
            found = await answer
            is_answered = True
        except AppError as error:
            reply.fail(error)
            raise
        finally:
            try:
                await reply.close()
            finally:
                if not is_answered:
                    self._open.remove(reply)
                    reply.note_end()
        return found

    def delivery(self, scope: Scope) -> Delivery:
        """Return the delivery of a response that holds the open replies whole; its count is not used."""
        replies = tuple(self._open)

        def note_sent(_: int) -> None:
            for reply in replies:
                reply.note_sent(reply.shown_tokens)

        return Delivery(scope, note_sent)

    async def end(self, delivery: Delivery | None = None) -> None:
        """Complete the rows, and close the ledger entries; further calls do nothing.

        With the `delivery` of the response that sends the replies, the entries are closed when its bytes have left.
        """
        replies, self._open = self._open, []
        async with AsyncExitStack() as stack:  # calls everything, last first, even if some of it fails
            for reply in replies:
                if delivery is None:
                    stack.callback(reply.note_end)
                else:
                    stack.callback(delivery.finish, reply.note_end)
                stack.push_async_callback(reply.close)


class CountedResponse(Response):
    """A response that holds whole replies; their tokens count as sent once it was sent."""

    def __init__(self, answer: Response, replies: Replies) -> None:
        self._replies = replies
        super().__init__(answer.body, answer.status_code)
        self.raw_headers = answer.raw_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, and end the replies."""
        delivery = self._replies.delivery(scope)

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.body":
                delivery.announce(0)
            await send(message)

        try:
            await super().__call__(scope, receive, send_counted)
            delivery.accept()
        finally:
            await self._replies.end(delivery)


async def _replies(request: Request) -> AsyncIterator[Replies]:
    replies = Replies(request.app.state.serving)
    try:
        yield replies
    finally:
        await replies.end()  # of a request whose response was never sent


RepliesDep = Annotated[Replies, Depends(_replies)]
