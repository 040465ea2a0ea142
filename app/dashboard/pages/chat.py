"""The chat page: ask a fine-tuned model and its base model the same question, and compare the replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from anyio import create_task_group
from fastapi import APIRouter, Query, Request
from sqlalchemy.orm import Session
from starlette.responses import Response

from app.catalog import service as catalog
from app.catalog.schemas import ModelOut
from app.dashboard.fields import NO_FAULTS, Faults
from app.dashboard.rendering import page
from app.dashboard.viewer import FormViewerDep, Viewer, ViewerDep
from app.db import Begin
from app.deps import LookDep, ReadDep
from app.errors import AppError
from app.http.validation_errors import read
from app.inference import chat
from app.inference.replies import CountedResponse, Replies, RepliesDep
from app.inference.schemas import ChatCreate
from app.policies import service as policies

router = APIRouter(include_in_schema=False)

_TOKENS = 256  # of a reply at most
_CHARS = 16_000  # of a question at most


@dataclass(frozen=True, slots=True)
class Asked:
    """The models that can be asked, the base model of the chosen one, and for how many days texts are stored."""

    models: list[ModelOut]
    base: str | None
    stored_days: int | None


@dataclass(slots=True)
class Answer:
    """The reply of one model, or the problem that prevented it."""

    model: str
    name: str
    text: str = ""
    problem: str = ""
    retry_after_s: int | None = None  # if trying again may help


@router.get("/chat")
def chat_page(
    request: Request, viewer: ViewerDep, session: ReadDep, model: Annotated[str, Query(max_length=256)] = ""
) -> Response:
    """Show the models that can be asked."""
    asked = _read_model(session, viewer, model)
    chosen = model or (asked.models[-1].id if asked.models else "")
    return _page(request, viewer, asked, chosen)


@router.post("/chat")
async def ask(request: Request, viewer: FormViewerDep, look: LookDep, replies: RepliesDep) -> Response:
    """Ask the model and the base model that it was trained from."""
    form = await request.form()
    model, question = str(form.get("model", "")), str(form.get("question", "")).strip()
    asked = await viewer.lanes.reads.project_share(viewer.project_id).run(partial(_look_up_model, look, viewer, model))
    if not question or len(question) > _CHARS:
        told = f"A question has up to {_CHARS:,} characters." if question else "Write a question first."
        return _page(request, viewer, asked, model, question[:_CHARS], faults=Faults({"question": told}))
    answers = [Answer(asked.base, "Base model")] if asked.base else []
    answers.append(Answer(model, "This model"))
    async with create_task_group() as group:
        for answer in answers:
            group.start_soon(_ask, replies, viewer, answer, question)
    return CountedResponse(_page(request, viewer, asked, model, question, answers), replies)


def _page(
    request: Request,
    viewer: Viewer,
    asked: Asked,
    model: str,
    question: str = "",
    answers: Sequence[Answer] = (),
    faults: Faults = NO_FAULTS,
) -> Response:
    return page(
        request,
        "chat",
        viewer,
        status=400 if faults else 200,
        asked=asked,
        model=model,
        question=question,
        answers=answers,
        faults=faults,
    )


def _look_up_model(look: Begin, viewer: Viewer, model: str) -> Asked:
    with look() as session:
        return _read_model(session, viewer, model)


def _read_model(session: Session, viewer: Viewer, model: str) -> Asked:
    serving, project_id = policies.serving(session), viewer.project_id
    job, models = (
        catalog.find_tuned_job(session, project_id, model, serving),
        catalog.models(session, project_id, serving),
    )
    return Asked(models, job.model if job else None, serving.store.days if serving.store else None)


async def _ask(replies: Replies, viewer: Viewer, answer: Answer, question: str) -> None:
    try:
        asked = _request(answer.model, question)
        reply = await replies.open(viewer.principal, asked.model, asked.ask(), "chat.completions")
        answer.name += "" if reply.is_attested else ", not attested"
        found = await replies.read_whole(reply, chat.whole(reply, asked))
        answer.text = found.choices[0].message.content or ""
    except AppError as error:
        answer.problem = error.message
        answer.retry_after_s = error.retry_after_s


def _request(model: str, question: str) -> ChatCreate:
    messages = [{"role": "user", "content": question}]
    return read(ChatCreate, {"model": model, "messages": messages, "temperature": 0, "max_tokens": _TOKENS})
