"""Build OpenAI's response object from a reply, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel

from app.inference.protocol import Finish
from app.inference.response_schemas import ResponseCreate, ResponseTool
from app.inference.service import Reply
from app.inference.tool_calls import Sieve, ToolCall

Status = Literal["in_progress", "completed", "incomplete"]
Event = dict[str, object]


class OutputText(BaseModel):
    """A text part of the model's message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[str] = []
    logprobs: list[str] = []


class OutputMessage(BaseModel):
    """The model's message."""

    type: Literal["message"] = "message"
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputCall(BaseModel):
    """A tool call of the model."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["completed"] = "completed"


class CachedTokens(BaseModel):
    """Cached tokens: always 0, as nothing is cached between requests."""

    cached_tokens: Literal[0] = 0
    cache_write_tokens: Literal[0] = 0


class ReasoningTokens(BaseModel):
    """Reasoning tokens: always 0, as thinking is off like in training and audit."""

    reasoning_tokens: Literal[0] = 0


class ResponseUsage(BaseModel):
    """A request's tokens: of its input, of its output, and in total."""

    input_tokens: int
    input_tokens_details: CachedTokens = CachedTokens()
    output_tokens: int
    output_tokens_details: ReasoningTokens = ReasoningTokens()
    total_tokens: int


class Incomplete(BaseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens", "content_filter"] = "max_output_tokens"


class ResponseOut(BaseModel):
    """OpenAI's response object: the model's reply to a conversation, with its usage and status."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    error: None = None
    access_programs: None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputMessage | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: None = None
    temperature: float
    tool_choice: str
    tools: list[ResponseTool]
    top_p: float
    store: Literal[False] = False
    usage: ResponseUsage | None
    metadata: dict[str, str]


@dataclass(slots=True)
class _Answer:
    """A response while its pieces arrive."""

    reply: Reply
    ask: ResponseCreate
    sieve: Sieve = field(init=False)
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    finish: Finish | None = None

    def __post_init__(self) -> None:
        self.sieve = Sieve(frozenset(tool.name for tool in self.ask.offered_tools))

    @property
    def status(self) -> Status:
        """The status of the response and its message; `incomplete` if it was cut by length or by the guard."""
        if self.finish is None:
            return "in_progress"
        return "incomplete" if self.finish in ("length", "content_filter") else "completed"

    def message(self, status: Status) -> OutputMessage:
        parts = [OutputText(text=self.text)] if status != "in_progress" else []
        return OutputMessage(id=self.id("msg"), status=status, content=parts)

    def output(self) -> list[OutputMessage | OutputCall]:
        said: list[OutputMessage | OutputCall] = [self.message(self.status)] if self.text or not self.calls else []
        return [*said, *map(_output_call, self.calls)]

    def to_response(self) -> ResponseOut:
        reply, ask, is_over = self.reply, self.ask, self.finish is not None
        read, written = reply.outcome.prompt_tokens, reply.outcome.reply_tokens
        usage = ResponseUsage(input_tokens=read, output_tokens=written, total_tokens=read + written)
        return ResponseOut(
            id=self.id("resp"),
            created_at=reply.created,
            status=self.status,
            incomplete_details=_why(self.finish),
            instructions=ask.instructions,
            max_output_tokens=ask.max_output_tokens,
            model=ask.model,
            output=self.output() if is_over else [],
            parallel_tool_calls=ask.parallel_tool_calls is not False,
            temperature=1.0 if ask.temperature is None else ask.temperature,
            tool_choice="none" if ask.tool_choice == "none" else "auto",
            tools=ask.tools or [],
            top_p=1.0 if ask.top_p is None else ask.top_p,
            usage=usage if is_over else None,
            metadata=ask.metadata or {},
        )

    def id(self, kind: str) -> str:
        return f"{kind}_{self.reply.call.id.removeprefix('call_')}"

    async def deltas(self) -> AsyncIterator[str]:
        """Yield the text to show as it arrives, without tool calls."""
        async for said in self.reply.pieces():
            shown = self.sieve.add(said["text"])
            if said["finish"]:
                rest, self.calls = self.sieve.end()
                shown, self.finish = shown + rest, said["finish"]
            self.text += shown
            if shown:
                yield shown


async def whole(reply: Reply, ask: ResponseCreate) -> ResponseOut:
    """Wait for the response's end and return it; raise `NotFound` if the model is no longer released by then."""
    answer = _Answer(reply, ask)
    async for _ in answer.deltas():
        pass
    await reply.check()
    return answer.to_response()


async def events(reply: Reply, ask: ResponseCreate) -> AsyncIterator[Event]:
    """Yield the events of a stream, each with its `type`; the route adds sequence numbers."""
    answer = _Answer(reply, ask)
    begun = answer.to_response().model_dump()
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    at: Event = {"item_id": answer.id("msg"), "output_index": 0, "content_index": 0}
    is_open = False
    async for delta in answer.deltas():
        if not is_open:
            is_open = True
            item = answer.message("in_progress").model_dump()
            yield {"type": "response.output_item.added", "output_index": 0, "item": item}
            yield {"type": "response.content_part.added", **at, "part": OutputText(text="").model_dump()}
        yield {"type": "response.output_text.delta", **at, "delta": delta, "logprobs": []}
    if is_open:
        yield {"type": "response.output_text.done", **at, "text": answer.text, "logprobs": []}
        yield {"type": "response.content_part.done", **at, "part": OutputText(text=answer.text).model_dump()}
        item = answer.message(answer.status).model_dump()
        yield {"type": "response.output_item.done", "output_index": 0, "item": item}
    for index, call in enumerate(answer.calls, start=int(is_open)):
        for event in _calling(index, _output_call(call)):
            yield event
    end = answer.to_response()
    yield {"type": f"response.{end.status}", "response": end.model_dump()}


def _why(finish: Finish | None) -> Incomplete | None:
    if finish == "content_filter":
        return Incomplete(reason="content_filter")
    return Incomplete() if finish == "length" else None


def _output_call(call: ToolCall) -> OutputCall:
    return OutputCall(
        id=f"fc_{call.id.removeprefix('call_')}", call_id=call.id, name=call.name, arguments=call.arguments
    )


def _calling(index: int, call: OutputCall) -> list[Event]:
    item, at = call.model_dump(), {"item_id": call.id, "output_index": index}
    return [
        {"type": "response.output_item.added", "output_index": index, "item": item | {"arguments": ""}},
        {"type": "response.function_call_arguments.delta", **at, "delta": call.arguments},
        {"type": "response.function_call_arguments.done", **at, "name": call.name, "arguments": call.arguments},
        {"type": "response.output_item.done", "output_index": index, "item": item},
    ]
