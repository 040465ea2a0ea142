"""OpenAI's inference endpoints, for base models and a project's own released models."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, TypeVar

from anyio import create_task_group
from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from app.deps import CustomerDep, ReadDep, SettingsDep
from app.errors import AppError, HasNone
from app.http.delivery import Delivery
from app.inference import chat, completions, responses
from app.inference.chat import ChatCompletion
from app.inference.completions import Completion
from app.inference.guard import open_guard
from app.inference.replies import CountedResponse, Replies, RepliesDep
from app.inference.response_schemas import ResponseCreate
from app.inference.responses import ResponseOut
from app.inference.schemas import ChatCreate, CompletionCreate, Moderation
from app.inference.service import Reply, Serving
from app.policies import service as policies

router = APIRouter(prefix="/v1", tags=["inference"])

Found = TypeVar("Found")


async def _serving(request: Request) -> Serving:
    serving: Serving = request.app.state.serving
    return serving


ServingDep = Annotated[Serving, Depends(_serving)]


@router.post("/chat/completions", response_model=ChatCompletion)
async def create_chat_completion(
    ask: ChatCreate, request: Request, caller: CustomerDep, replies: RepliesDep
) -> Response:
    """Continue a conversation with a base model or one of your own; with `stream`, as server-sent events."""

    async def answer() -> Response:
        reply = await replies.open(caller, ask.model, ask.ask(), "chat.completions")
        if ask.stream:
            return _Events(replies, reply, chat.chunks(reply, ask))
        return await _whole(replies, reply, chat.whole(reply, ask))

    return await _unless_gone(request, answer)


@router.post("/completions", response_model=Completion)
async def create_completion(
    ask: CompletionCreate, request: Request, caller: CustomerDep, replies: RepliesDep
) -> Response:
    """Continue a text, without a chat template."""

    async def answer() -> Response:
        reply = await replies.open(caller, ask.model, ask.ask(), "completions")
        if ask.stream:
            return _Events(replies, reply, completions.chunks(reply, ask))
        return await _whole(replies, reply, completions.whole(reply, ask))

    return await _unless_gone(request, answer)


@router.post("/responses", response_model=ResponseOut)
async def create_response(ask: ResponseCreate, request: Request, caller: CustomerDep, replies: RepliesDep) -> Response:
    """Continue a conversation through OpenAI's newer interface; responses cannot be continued by their ids."""

    async def answer() -> Response:
        reply = await replies.open(caller, ask.model, ask.ask(), "responses")
        if ask.stream:
            return _Events(replies, reply, responses.events(reply, ask), has_types=True)
        return await _whole(replies, reply, responses.whole(reply, ask))

    return await _unless_gone(request, answer)


@router.post("/moderations", response_model=None)
async def create_moderation(
    body: Moderation, caller: CustomerDep, session: ReadDep, settings: SettingsDep, serving: ServingDep
) -> Response:
    """Forward the request to the moderation endpoint of the policy in force, and return its answer unchanged."""
    guard = open_guard(policies.current(session, settings).content.serving.guard, settings, serving.clients)
    if guard is None:
        raise HasNone("The policy in force names no moderation endpoint.", code="no_guard")
    found = await guard.moderate(body.model_dump(exclude_none=True))
    return Response(json.dumps(found), media_type="application/json")


class _Events(StreamingResponse):
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


async def _whole(replies: Replies, reply: Reply, answer: Awaitable[BaseModel]) -> Response:
    found = await replies.read_whole(reply, answer)
    text = found.model_dump_json()
    return CountedResponse(Response(text, media_type="application/json", headers=_marks(reply)), replies)


def _marks(reply: Reply) -> dict[str, str]:
    """Return headers for a reply without proven weights, and for stored texts."""
    marks = {} if reply.is_attested else {"x-spard-attested": "false"}
    days = reply.call.store_days
    return marks if days is None else marks | {"x-spard-stored-days": str(days)}


async def _unless_gone(request: Request, work: Callable[[], Awaitable[Found]]) -> Found:
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
