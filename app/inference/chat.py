"""Build OpenAI's chat completion objects from a reply, whole or as a stream of chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel
from pydantic.json_schema import SkipJsonSchema

from app.http.schemas import Absent
from app.inference.protocol import Said, Token
from app.inference.schemas import ChatCreate
from app.inference.service import Reply
from app.inference.tool_calls import Sieve, ToolCall

Reason = Literal["stop", "length", "tool_calls", "content_filter"]


class CalledOut(BaseModel):
    """The called function; `arguments` is JSON text."""

    name: str
    arguments: str


class CallOut(BaseModel):
    """A tool call of the model."""

    id: str
    type: Literal["function"] = "function"
    function: CalledOut


class MessageOut(BaseModel):
    """The model's message; `content` is null if it only calls tools."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: Annotated[list[CallOut] | SkipJsonSchema[None], Absent] = None


class AlternativeOut(BaseModel):
    """A token with its log probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenOut(AlternativeOut):
    """A token of the reply, with the likeliest tokens at its position."""

    top_logprobs: list[AlternativeOut]


class LogprobsOut(BaseModel):
    """Log probabilities of a reply, token by token."""

    content: list[TokenOut]
    refusal: None = None


class ChoiceOut(BaseModel):
    """One of the `n` replies."""

    index: int
    message: MessageOut
    logprobs: LogprobsOut | None
    finish_reason: Reason


class UsageOut(BaseModel):
    """A request's tokens: of the prompt, of all replies, and in total."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatCompletion(BaseModel):
    """The replies to a conversation; `system_fingerprint` is the digest of the adapter, null for a base model."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChoiceOut]
    usage: UsageOut
    system_fingerprint: str | None


@dataclass(slots=True)
class _Choice:
    """One of the `n` replies while its pieces arrive."""

    sieve: Sieve
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    finish: Reason | None = None

    def add(self, said: Said) -> str:
        """Add a piece, and return the text that can be shown now."""
        shown = self.sieve.add(said["text"])
        self.tokens += said.get("tokens", [])
        if said["finish"]:
            rest, self.calls = self.sieve.end()
            shown += rest
            self.finish = "tool_calls" if self.calls else said["finish"]
        self.text += shown
        return shown


def reply_usage(reply: Reply) -> UsageOut:
    """Return a request's usage in tokens, as far as the reply has come."""
    read, written = reply.outcome.prompt_tokens, reply.outcome.reply_tokens
    return UsageOut(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)


async def whole(reply: Reply, ask: ChatCreate) -> ChatCompletion:
    """Wait for all replies and return the completion; raise `NotFound` if the model is no longer released by then."""
    choices = _choices(ask)
    async for said in reply.pieces():
        choices[said["index"]].add(said)
    await reply.check()
    return ChatCompletion(
        id=_id(reply),
        created=reply.created,
        model=ask.model,
        choices=[_choice_response(i, choice, bool(ask.logprobs)) for i, choice in enumerate(choices)],
        usage=reply_usage(reply),
        system_fingerprint=reply.fingerprint,
    )


async def chunks(reply: Reply, ask: ChatCreate) -> AsyncIterator[dict[str, object]]:
    """Yield the chunks of a stream as JSON objects: a role chunk for each reply, then deltas, then usage if asked."""
    choices = _choices(ask)

    def chunk(index: int, delta: object, finish: Reason | None = None, tokens: object = None) -> dict[str, object]:
        choice = {"index": index, "delta": delta, "logprobs": tokens, "finish_reason": finish}
        return _chunk(reply, ask, [choice])

    for index in range(len(choices)):
        yield chunk(index, {"role": "assistant", "content": "", "refusal": None})
    async for said in reply.pieces():
        index, choice = said["index"], choices[said["index"]]
        shown = choice.add(said)
        tokens = {"content": said.get("tokens", []), "refusal": None} if ask.logprobs else None
        if shown or (tokens and tokens["content"]):
            yield chunk(index, {"content": shown}, tokens=tokens)
        if choice.calls:
            yield chunk(index, {"tool_calls": [_call_delta(i, call) for i, call in enumerate(choice.calls)]})
        if choice.finish:
            yield chunk(index, {}, choice.finish)
    if ask.includes_usage:
        yield _chunk(reply, ask, []) | {"usage": reply_usage(reply).model_dump()}


def _choices(ask: ChatCreate) -> list[_Choice]:
    names = frozenset(tool.function.name for tool in ask.offered_tools)
    return [_Choice(Sieve(names)) for _ in range(ask.n or 1)]


def _id(reply: Reply) -> str:
    return f"chatcmpl-{reply.call.id.removeprefix('call_')}"


def _chunk(reply: Reply, ask: ChatCreate, choices: list[dict[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {
        "id": _id(reply),
        "object": "chat.completion.chunk",
        "created": reply.created,
        "model": ask.model,
        "system_fingerprint": reply.fingerprint,
        "choices": choices,
    }
    return found | {"usage": None} if ask.includes_usage else found


def _choice_response(index: int, choice: _Choice, with_logprobs: bool) -> ChoiceOut:
    calls = [CallOut(id=each.id, function=CalledOut(name=each.name, arguments=each.arguments)) for each in choice.calls]
    tokens = [TokenOut.model_validate(each) for each in choice.tokens]
    content = None if calls and not choice.text else choice.text
    return ChoiceOut(
        index=index,
        message=MessageOut(content=content, tool_calls=calls or None),
        logprobs=LogprobsOut(content=tokens) if with_logprobs else None,
        finish_reason=choice.finish or "stop",
    )


def _call_delta(index: int, call: ToolCall) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": index, "id": call.id, "type": "function", "function": function}
