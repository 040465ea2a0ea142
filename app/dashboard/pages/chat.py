"""A base model and a fine-tuned one, asked the same and shown side by side."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from anyio import create_task_group
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from app.catalog import service as catalog
from app.dashboard.fields import Faults
from app.dashboard.rendering import page
from app.dashboard.viewer import FormViewerDep, Viewer, ViewerDep
from app.db import Begin
from app.deps import LookDep, ReadDep
from app.errors import AppError
from app.inference import chat
from app.inference.schemas import ChatCreate
from app.inference.service import Serving

router = APIRouter(include_in_schema=False)

_TOKENS = 256  # of a reply
_CHARS = 16_000  # of a question


@dataclass(slots=True)
class Answer:
    """What one model said, or why it did not."""

    model: str
    name: str
    text: str = ""
    problem: str = ""
    retry_after_s: int | None = None  # where asking again may help


@router.get("/chat")
def chat_page(
    request: Request, viewer: ViewerDep, session: ReadDep, model: Annotated[str, Query(max_length=256)] = ""
) -> Response:
    """Show what can be asked."""
    models = [each.id for each in catalog.models(session, viewer.project_id)]
    model = model or (models[-1] if models else "")
    return page(request, "chat", viewer, models=models, model=model, answers=[], question="", faults=Faults())


@router.post("/chat")
async def ask(request: Request, viewer: FormViewerDep, look: LookDep) -> Response:
    """Ask the model and the base model that it was trained from."""
    form = await request.form()
    model, question = str(form.get("model", "")), str(form.get("question", "")).strip()
    models, base = await viewer.lanes.reads.of(viewer.project_id).run(partial(_models, look, viewer, model))
    if not question or len(question) > _CHARS:
        told = f"A question has up to {_CHARS:,} characters." if question else "Write a question first."
        shown = {"models": models, "model": model, "answers": [], "question": question[:_CHARS]}
        return page(request, "chat", viewer, status=400, faults=Faults({"question": told}), **shown)
    answers = [Answer(base, "Base model")] if base else []
    answers.append(Answer(model, "This model"))
    serving: Serving = request.app.state.serving
    async with create_task_group() as group:
        for answer in answers:
            group.start_soon(_ask, serving, viewer, answer, question)
    return page(
        request, "chat", viewer, models=models, model=model, answers=answers, question=question, faults=Faults()
    )


def _models(look: Begin, viewer: Viewer, model: str) -> tuple[list[str], str | None]:
    """Return what can be asked, and the base model of a fine-tuned model of the project; None for any other name."""
    with look() as session:
        job = catalog.tuned(session, viewer.project_id, model)
        return [each.id for each in catalog.models(session, viewer.project_id)], job.model if job else None


async def _ask(serving: Serving, viewer: Viewer, answer: Answer, question: str) -> None:
    try:
        asked = _request(answer.model, question)
        reply = await serving.open(viewer.principal, asked.model, asked.ask(), "chat.completions")
        try:
            found = await chat.whole(reply, asked)
        except AppError as error:
            reply.fail(error)
            raise
        finally:
            await reply.close()
        answer.text = found.choices[0].message.content or ""
    except AppError as error:
        answer.problem = error.message
        answer.retry_after_s = error.retry_after_s


def _request(model: str, question: str) -> ChatCreate:
    messages = [{"role": "user", "content": question}]
    return ChatCreate.model_validate({"model": model, "messages": messages, "temperature": 0, "max_tokens": _TOKENS})
