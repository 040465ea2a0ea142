"""Answer a request with the replies of a model, whole or as server-sent events, for the API and the chat page alike."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Annotated, TypeVar

from anyio import create_task_group
from fastapi import Depends
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from app.errors import AppError
from app.http.connections import Delivery
from app.inference.protocol import Ask
from app.inference.service import InferenceService, Reply
from app.keys import Principal

Found = TypeVar("Found")


class EventStream(StreamingResponse):
    """The chunks of a reply as OpenAI streams them; an error during the reply is sent as the last event.

    With `has_types`, each chunk is sent as a numbered event of its `type`.
    """

    def __init__(
        self, replies: Replies, reply: Reply, chunks: AsyncIterator[dict[str, object]], *, has_types: bool = False
    ) -> None:
        self._replies, self._reply, self._chunks, self._has_types = replies, reply, chunks, has_types
        headers = {"cache-control": "no-store", **_marks(reply)}
        super().__init__(self._lines(), media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; the reply is closed even if the client left before it began."""
        self._delivery = Delivery(scope, self._reply.note_sent)
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._replies.end(self._delivery)

    async def _lines(self) -> AsyncIterator[str]:
        number = 0
        try:
            async for chunk in self._chunks:
                self._delivery.announce(self._reply.shown_tokens)
                yield self._line(chunk, number)
                self._delivery.accept()
                number += 1
        except AppError as error:
            self._reply.fail(error)
            told = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
            yield self._line({"type": "error", "error": told} if self._has_types else {"error": told}, number)
        else:
            if not self._has_types:
                yield "data: [DONE]\n\n"

    def _line(self, chunk: dict[str, object], number: int) -> str:
        if not self._has_types:
            return f"data: {json.dumps(chunk)}\n\n"
        return f"event: {chunk['type']}\ndata: {json.dumps(chunk | {'sequence_number': number})}\n\n"


async def send_whole(replies: Replies, reply: Reply, answer: Awaitable[BaseModel]) -> Response:
    """Return the response with an answer that is not streamed; once it is sent, its tokens count as sent."""
    found = await replies.read_whole(reply, answer)
    text = found.model_dump_json()
    return CountedResponse(Response(text, media_type="application/json", headers=_marks(reply)), replies)


def _marks(reply: Reply) -> dict[str, str]:
    """Return headers that say if a reply's weights are not proved, and for how many days its texts are stored."""
    marks = {} if reply.is_attested else {"x-spard-attested": "false"}
    days = reply.call.store_days
    return marks if days is None else marks | {"x-spard-stored-days": str(days)}


async def unless_gone(request: Request, work: Callable[[], Awaitable[Found]]) -> Found:
    """Return the result of `work`; cancel it and raise `ClientDisconnect` if the client leaves."""
    found, failed = list[Found](), list[Exception]()
    async with create_task_group() as group:

        async def until_gone() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        group.start_soon(until_gone)
        try:
            found.append(await work())
        except Exception as error:  # raised below: the group wraps it, and no handler knows groups
            failed.append(error)
        group.cancel_scope.cancel()
    if failed:
        raise failed[0]
    if not found:
        raise ClientDisconnect
    return found[0]


# Take the replies that one HTTP request needs, count what of them is sent, and end each of them with the request.
#
# Take replies only through `RepliesDep`: an entry of the ledger that is never closed keeps its slot for as long as
# the process lives, and once the process has ended, `app.inference.call_leases` bills the request with what the entry
# counts.


class Replies:
    """The replies of one request; `end` closes those that were opened and their entries in the ledger."""

    def __init__(self, serving: InferenceService) -> None:
        self._serving = serving
        self._open: list[Reply] = []

    async def open(self, caller: Principal, name: str, ask: Ask, endpoint: str) -> Reply:
        """Start a reply as `InferenceService.open` does; it ends with the request at the latest."""
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
        """Return the delivery of a response that is not streamed; the count that it passes on is not used."""
        replies = tuple(self._open)

        def note_sent(_: int) -> None:
            for reply in replies:
                reply.note_sent(reply.shown_tokens)

        return Delivery(scope, note_sent)

    async def end(self, delivery: Delivery | None = None) -> None:
        """Complete the rows of all open replies and close their ledger entries; further calls do nothing.

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
    """A response that is not streamed; once it is sent, the tokens of its replies count as sent."""

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
