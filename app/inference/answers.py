"""Answer a request with the replies of a model, whole or as server-sent events, for the API and the chat page alike."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from anyio import create_task_group
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from app.errors import AppError
from app.http.delivery import Delivery
from app.inference.replies import CountedResponse, Replies
from app.inference.service import Reply

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
    """Return the response with a whole answer; its tokens count as sent once it was sent."""
    found = await replies.read_whole(reply, answer)
    text = found.model_dump_json()
    return CountedResponse(Response(text, media_type="application/json", headers=_marks(reply)), replies)


def _marks(reply: Reply) -> dict[str, str]:
    """Return headers for a reply without proven weights, and for stored texts."""
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
