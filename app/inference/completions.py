"""Build OpenAI's chat completions and legacy text completions from a reply, whole or as a stream of chunks.

Tool calls are parsed from the model's text, in the formats that chat templates teach.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel
from pydantic.json_schema import SkipJsonSchema

from app.db.base import new_id
from app.http.schemas import Absent
from app.inference.protocol import EngineMessage, Finish, Token
from app.inference.schemas import ChatCreate, CompletionCreate
from app.inference.service import Reply

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"  # Qwen, Hermes and others: one object in each pair
_LISTS = ("[TOOL_CALLS]", "<|python_tag|>", "<|tool_call|>")  # Mistral, Llama, Granite: objects after the mark
_MARKS = (_OPEN, *_LISTS)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class Sieve:
    """Splits a streamed reply into text and tool calls; `names` are the tools that the request offers.

    Text that may be part of a call is held back until the reply ends.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names, self._text, self._shown = names, "", 0

    def add(self, text: str) -> str:
        """Add text and return the part that can be shown now."""
        self._text += text
        if not self._names:
            upto = len(self._text)
        elif self._text.lstrip()[:1] in ("", "{", "["):  # a whole reply may be a call
            upto = 0
        else:
            upto = min((at for mark in _MARKS if (at := self._text.find(mark)) >= 0), default=self._before_mark())
        shown, self._shown = self._text[self._shown : upto], max(self._shown, upto)
        return shown

    def end(self) -> tuple[str, list[ToolCall]]:
        """Return the remaining text and the calls; if any call cannot be parsed, everything is text."""
        calls = self._calls()
        if calls is None:
            return self._text[self._shown :], []
        before = min((at for mark in _MARKS if (at := self._text.find(mark)) >= 0), default=0)
        return self._text[self._shown : before], calls

    def _before_mark(self) -> int:
        """Return the position where the end of the text may be the beginning of a mark, else the text's length."""
        held = max((n for mark in _MARKS for n in range(1, len(mark)) if self._text.endswith(mark[:n])), default=0)
        return len(self._text) - held

    def _calls(self) -> list[ToolCall] | None:
        if not self._names:
            return None
        bodies = [part.partition(_CLOSE)[0] for part in self._text.split(_OPEN)[1:]]
        for mark in _LISTS:
            if not bodies and mark in self._text:
                bodies = [self._text.partition(mark)[2]]
        found = [_read_calls(body) for body in bodies or [self._text]]
        if any(each is None for each in found):
            return None
        calls = [call for each in found for call in each or ()]
        return calls if calls and all(call.name in self._names for call in calls) else None


def _read_calls(body: str) -> list[ToolCall] | None:
    """Parse one object or a list of objects with `name` and `arguments` (Llama: `parameters`); None if invalid."""
    try:
        value = json.loads(body.strip())
    except (ValueError, RecursionError):
        return None
    found = []
    for each in value if isinstance(value, list) else [value]:
        name = each.get("name") if isinstance(each, dict) else None
        if not isinstance(name, str):
            return None
        arguments = each.get("arguments", each.get("parameters", {}))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        found.append(ToolCall(new_id("call_"), name, text))
    return found


# Build chat completions.

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
class _ChatChoice:
    """One of the `n` replies while its pieces arrive."""

    sieve: Sieve
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    finish: Reason | None = None

    def add(self, said: EngineMessage) -> str:
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


async def chat_completion(reply: Reply, ask: ChatCreate) -> ChatCompletion:
    """Wait for all replies and return the completion; raise `NotFound` if the model is no longer released by then."""
    choices = _empty_choices(ask)
    async for said in reply.pieces():
        choices[said["index"]].add(said)
    await reply.check()
    return ChatCompletion(
        id=_chat_id(reply),
        created=reply.created,
        model=ask.model,
        choices=[_chat_choice(i, choice, bool(ask.logprobs)) for i, choice in enumerate(choices)],
        usage=reply_usage(reply),
        system_fingerprint=reply.fingerprint,
    )


async def chat_chunks(reply: Reply, ask: ChatCreate) -> AsyncIterator[dict[str, object]]:
    """Yield the chunks of a stream as JSON objects: a role chunk for each reply, then deltas, then usage if asked."""
    choices = _empty_choices(ask)

    def chunk(index: int, delta: object, finish: Reason | None = None, tokens: object = None) -> dict[str, object]:
        choice = {"index": index, "delta": delta, "logprobs": tokens, "finish_reason": finish}
        return _chat_chunk(reply, ask, [choice])

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
        yield _chat_chunk(reply, ask, []) | {"usage": reply_usage(reply).model_dump()}


def _empty_choices(ask: ChatCreate) -> list[_ChatChoice]:
    names = frozenset(tool.function.name for tool in ask.offered_tools)
    return [_ChatChoice(Sieve(names)) for _ in range(ask.n or 1)]


def _chat_id(reply: Reply) -> str:
    return f"chatcmpl-{reply.call.id.removeprefix('call_')}"


def _chat_chunk(reply: Reply, ask: ChatCreate, choices: list[dict[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {
        "id": _chat_id(reply),
        "object": "chat.completion.chunk",
        "created": reply.created,
        "model": ask.model,
        "system_fingerprint": reply.fingerprint,
        "choices": choices,
    }
    return found | {"usage": None} if ask.includes_usage else found


def _chat_choice(index: int, choice: _ChatChoice, with_logprobs: bool) -> ChoiceOut:
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


# Build legacy text completions.


class TextLogprobs(BaseModel):
    """Log probabilities of a reply's tokens; `text_offset` is each token's position in the shown text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(BaseModel):
    """One of the `n` replies."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


class Completion(BaseModel):
    """The continuations of a text."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageOut | None = None
    system_fingerprint: str | None


async def text_completion(reply: Reply, ask: CompletionCreate) -> Completion:
    """Wait for all replies and return the completion; raise `NotFound` if the model is no longer released by then."""
    texts = [_start(ask)] * (ask.n or 1)
    tokens: list[list[Token]] = [[] for _ in texts]
    ends: list[Finish | None] = [None for _ in texts]
    async for said in reply.pieces():
        index = said["index"]
        texts[index] += said["text"]
        tokens[index] += said.get("tokens", [])
        ends[index] = said["finish"]
    await reply.check()
    found = [
        TextChoice(index=i, text=text, logprobs=_logprobs(ask, tokens[i], len(_start(ask))), finish_reason=ends[i])
        for i, text in enumerate(texts)
    ]
    return _completion(reply, ask, found, reply_usage(reply))


async def text_chunks(reply: Reply, ask: CompletionCreate) -> AsyncIterator[dict[str, object]]:
    """Yield the chunks of a stream as JSON objects; with `echo` the prompt comes first, and usage last if asked."""
    offsets = [0] * (ask.n or 1)
    if start := _start(ask):
        for index in range(len(offsets)):
            yield _piece(reply, ask, {"index": index, "text": start, "finish": None}, 0)
            offsets[index] = len(start)
    async for said in reply.pieces():
        yield _piece(reply, ask, said, offsets[said["index"]])
        offsets[said["index"]] += len(said["text"])
    if ask.includes_usage:
        yield _completion(reply, ask, [], reply_usage(reply)).model_dump()


def _piece(reply: Reply, ask: CompletionCreate, said: EngineMessage, offset: int) -> dict[str, object]:
    logprobs = _logprobs(ask, said.get("tokens", []), offset)
    choice = TextChoice(index=said["index"], text=said["text"], logprobs=logprobs, finish_reason=said["finish"])
    return _completion(reply, ask, [choice], None).model_dump()


def _start(ask: CompletionCreate) -> str:
    return (ask.ask()["prompt"] or "") if ask.echo else ""


def _completion(reply: Reply, ask: CompletionCreate, choices: list[TextChoice], usage: UsageOut | None) -> Completion:
    return Completion(
        id=f"cmpl-{reply.call.id.removeprefix('call_')}",
        created=reply.created,
        model=ask.model,
        choices=choices,
        usage=usage,
        system_fingerprint=reply.fingerprint,
    )


def _logprobs(ask: CompletionCreate, tokens: list[Token], offset: int) -> TextLogprobs | None:
    if ask.logprobs is None:
        return None
    offsets = list[int]()
    for token in tokens:
        offsets.append(offset)
        offset += len(token["token"])
    return TextLogprobs(
        tokens=[each["token"] for each in tokens],
        token_logprobs=[each["logprob"] for each in tokens],
        top_logprobs=[{other["token"]: other["logprob"] for other in each["top_logprobs"]} for each in tokens],
        text_offset=offsets,
    )
