"""The chat page: hold one conversation with a fine-tuned model and with its base model, and compare the replies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from anyio import create_task_group
from fastapi import APIRouter, Query, Request
from sqlalchemy.orm import Session
from starlette.datastructures import FormData
from starlette.responses import Response

from app.catalog import service as catalog
from app.catalog.schemas import ModelOut
from app.dashboard.rendering import page
from app.dashboard.viewer import NO_FAULTS, Faults, FormViewerDep, Viewer, ViewerDep
from app.db import Begin
from app.db.tables import File
from app.deps import LookDep, QuickStorageDep
from app.errors import AppError, HasNone, InvalidRequest, NotFound
from app.files import preview
from app.files import service as files
from app.http.validation_errors import read
from app.inference import completions
from app.inference.answers import CountedResponse, EventStream, Replies, RepliesDep, unless_gone
from app.inference.schemas import ChatCreate
from app.policies import service as policies

router = APIRouter(include_in_schema=False)

_TOKENS = 256  # of a reply at most
_CHARS = 16_000  # of a question or a system prompt at most
_TURNS = 12  # of a conversation at most; each takes three fields of the form

Side = Literal["base", "own"]


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """The models that can be asked and the chosen one, with its base model and the file that it was trained on.

    `stored_days` is for how many days texts are stored.
    """

    models: list[ModelOut]
    model: str
    base: str | None
    file: File | None
    stored_days: int | None


@dataclass(slots=True)
class Answer:
    """The reply of one model, or the problem that prevented it."""

    model: str
    side: Side
    text: str = ""
    problem: str = ""
    retry_after_s: int | None = None  # if trying again may help
    is_attested: bool = True


@dataclass(frozen=True, slots=True)
class Turn:
    """One question with the replies of both models; `base` is "" where there is no base model to compare with."""

    question: str
    base: str
    own: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system prompt and the answered turns; the form carries all of it, so that nothing is stored."""

    system: str = ""
    turns: tuple[Turn, ...] = ()

    @classmethod
    def from_form(cls, form: FormData) -> Conversation:
        """Return the conversation in the fields of a form."""
        said = [[_text(value) for value in form.getlist(name)] for name in ("asked", "base_reply", "own_reply")]
        turns = (Turn(*each) for each in zip(*said, strict=False))
        return cls(_text(form.get("system", "")).strip(), tuple(turns))

    def messages(self, side: Side, question: str) -> Iterator[dict[str, str]]:
        """Yield the messages of one model's side of the conversation, with `question` as the last."""
        if self.system:
            yield {"role": "system", "content": self.system}
        for turn in self.turns:
            yield {"role": "user", "content": turn.question}
            yield {"role": "assistant", "content": getattr(turn, side)}
        yield {"role": "user", "content": question}

    def fault(self, question: str) -> Faults:
        """Return why the question cannot be asked; nothing if it can."""
        if not question or len(question) > _CHARS:
            told = f"A question has up to {_CHARS:,} characters." if question else "Write a question first."
            return Faults({"question": told})
        if len(self.system) > _CHARS:
            return Faults({"system": f"A system prompt has up to {_CHARS:,} characters."})
        if len(self.turns) >= _TURNS:
            return Faults({"question": f"A conversation has up to {_TURNS} turns here. Start a new one."})
        return NO_FAULTS

    def add_turn(self, question: str, answers: Sequence[Answer]) -> Conversation:
        """Return the conversation with one more answered turn."""
        texts = {answer.side: answer.text for answer in answers}
        return Conversation(self.system, (*self.turns, Turn(question, texts.get("base", ""), texts["own"])))


@router.get("/chat")
async def chat_page(
    request: Request,
    viewer: ViewerDep,
    look: LookDep,
    storage: QuickStorageDep,
    model: Annotated[str, Query(max_length=256)] = "",
) -> Response:
    """Show the models that can be asked, with the system prompt of the rows that the chosen one was trained on."""

    def show_models() -> Response:
        asked = _look_up_model(look, viewer, model)
        system = preview.common_system_prompt(storage, asked.file) if asked.file else None
        shown = Conversation(system if system and len(system) <= _CHARS else "")
        return _page(request, viewer, asked, shown, is_of_rows=bool(shown.system))

    return await viewer.lanes.reads.project_share(viewer.project_id).run(show_models)


@router.post("/chat/reply")
async def stream_reply(request: Request, viewer: FormViewerDep, look: LookDep, replies: RepliesDep) -> Response:
    """Stream the reply of the model, or with `side=base` of its base model, as `/v1/chat/completions` does."""
    form = await request.form()
    model, question = str(form.get("model", "")), _text(form.get("question", "")).strip()
    side: Side = "base" if form.get("side") == "base" else "own"
    conversation = Conversation.from_form(form)
    for field, told in conversation.fault(question).by_field.items():
        raise InvalidRequest(told, param=field)
    asked = await viewer.lanes.reads.project_share(viewer.project_id).run(partial(_look_up_model, look, viewer, model))
    chosen = asked.base if side == "base" else asked.model
    if not chosen:
        raise HasNone("There is no base model to compare with.")
    body = _request(chosen, list(conversation.messages(side, question)))

    async def answer() -> Response:
        reply = await replies.open(viewer.principal, body.model, body.ask(), "chat.completions")
        return EventStream(replies, reply, completions.chat_chunks(reply, body))

    return await unless_gone(request, answer)


@router.post("/chat")
async def ask(request: Request, viewer: FormViewerDep, look: LookDep, replies: RepliesDep) -> Response:
    """Ask the model and the base model that it was trained from; without scripts, the page has the whole replies."""
    form = await request.form()
    model, question = str(form.get("model", "")), _text(form.get("question", "")).strip()
    asked = await viewer.lanes.reads.project_share(viewer.project_id).run(partial(_look_up_model, look, viewer, model))
    conversation = Conversation.from_form(form)
    if faults := conversation.fault(question):
        return _page(request, viewer, asked, conversation, question[:_CHARS], faults=faults)
    answers = [Answer(asked.base, "base")] if asked.base else []
    answers.append(Answer(model, "own"))
    async with create_task_group() as group:
        for answer in answers:
            group.start_soon(_ask, replies, viewer, answer, conversation, question)
    if any(answer.problem for answer in answers):
        # The question stays in its field, to be asked again.
        shown = _page(request, viewer, asked, conversation, question, answers)
    else:
        shown = _page(request, viewer, asked, conversation.add_turn(question, answers), "", answers)
    return CountedResponse(shown, replies)


def _page(
    request: Request,
    viewer: Viewer,
    asked: ChatChoice,
    conversation: Conversation,
    question: str = "",
    answers: Sequence[Answer] = (),
    faults: Faults = NO_FAULTS,
    *,
    is_of_rows: bool = False,
) -> Response:
    """Render the page; `is_of_rows` says that the system prompt is that of the training rows."""
    return page(
        request,
        "chat",
        viewer,
        status=400 if faults else 200,
        asked=asked,
        conversation=conversation,
        question=question,
        failed=[answer for answer in answers if answer.problem],
        attested={answer.side: answer.is_attested for answer in answers},
        faults=faults,
        is_of_rows=is_of_rows,
    )


def _look_up_model(look: Begin, viewer: Viewer, model: str) -> ChatChoice:
    with look() as session:
        return _read_model(session, viewer, model)


def _read_model(session: Session, viewer: Viewer, model: str) -> ChatChoice:
    serving, project_id = policies.serving(session), viewer.project_id
    models = catalog.models(session, project_id, serving)
    chosen = model or (models[-1].id if models else "")
    job = catalog.find_tuned_job(session, project_id, chosen, serving)
    try:
        file = files.get(session, project_id, job.training_file) if job else None
    except NotFound:
        file = None  # it was deleted after the training
    return ChatChoice(models, chosen, job.model if job else None, file, serving.store.days if serving.store else None)


async def _ask(replies: Replies, viewer: Viewer, answer: Answer, conversation: Conversation, question: str) -> None:
    try:
        asked = _request(answer.model, list(conversation.messages(answer.side, question)))
        reply = await replies.open(viewer.principal, asked.model, asked.ask(), "chat.completions")
        answer.is_attested = reply.is_attested
        found = await replies.read_whole(reply, completions.chat_completion(reply, asked))
        answer.text = found.choices[0].message.content or ""
    except AppError as error:
        answer.problem = error.message
        answer.retry_after_s = error.retry_after_s


def _request(model: str, messages: list[dict[str, str]]) -> ChatCreate:
    return read(ChatCreate, {"model": model, "messages": messages, "temperature": 0, "max_tokens": _TOKENS})


def _text(value: object) -> str:
    """Return a field's text with the line ends that it had; browsers send each as CR and LF."""
    return str(value).replace("\r\n", "\n")
