"""OpenAI's inference endpoints, for base models and a project's own released models."""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from app.deps import CustomerDep, ReadDep, SettingsDep
from app.errors import HasNone
from app.inference import completions, responses
from app.inference.answers import EventStream, RepliesDep, send_whole, unless_gone
from app.inference.completions import ChatCompletion, Completion
from app.inference.guard import open_guard
from app.inference.responses import ResponseCreate, ResponseOut
from app.inference.schemas import ChatCreate, CompletionCreate, Moderation
from app.inference.service import InferenceService
from app.policies import service as policies

router = APIRouter(prefix="/v1", tags=["inference"])


async def _serving(request: Request) -> InferenceService:
    serving: InferenceService = request.app.state.serving
    return serving


ServingDep = Annotated[InferenceService, Depends(_serving)]


@router.post("/chat/completions", response_model=ChatCompletion)
async def create_chat_completion(
    ask: ChatCreate, request: Request, caller: CustomerDep, replies: RepliesDep
) -> Response:
    """Continue a conversation with a base model or one of your own; with `stream`, as server-sent events."""

    async def answer() -> Response:
        reply = await replies.open(caller, ask.model, ask.ask(), "chat.completions")
        if ask.stream:
            return EventStream(replies, reply, completions.chat_chunks(reply, ask))
        return await send_whole(replies, reply, completions.chat_completion(reply, ask))

    return await unless_gone(request, answer)


@router.post("/completions", response_model=Completion)
async def create_completion(
    ask: CompletionCreate, request: Request, caller: CustomerDep, replies: RepliesDep
) -> Response:
    """Continue a text, without a chat template."""

    async def answer() -> Response:
        reply = await replies.open(caller, ask.model, ask.ask(), "completions")
        if ask.stream:
            return EventStream(replies, reply, completions.text_chunks(reply, ask))
        return await send_whole(replies, reply, completions.text_completion(reply, ask))

    return await unless_gone(request, answer)


@router.post("/responses", response_model=ResponseOut)
async def create_response(ask: ResponseCreate, request: Request, caller: CustomerDep, replies: RepliesDep) -> Response:
    """Continue a conversation through OpenAI's newer interface; responses cannot be continued by their ids."""

    async def answer() -> Response:
        reply = await replies.open(caller, ask.model, ask.ask(), "responses")
        if ask.stream:
            return EventStream(replies, reply, responses.events(reply, ask), has_types=True)
        return await send_whole(replies, reply, responses.whole(reply, ask))

    return await unless_gone(request, answer)


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
