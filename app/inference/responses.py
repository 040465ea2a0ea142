"""Read requests of `/v1/responses`, and build OpenAI's response object from a reply, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from app.http.schemas import LenientBody, Refusal
from app.inference.completions import Sieve, ToolCall
from app.inference.json_limits import Loose, ReplySchema, Schema
from app.inference.protocol import Ask, Finish, Message
from app.inference.schemas import Arguments, Call, CalledFunction, ChatMessage, Name, Text, TextPart, choice
from app.inference.service import Reply

Included = Literal[  # OpenAI's list of additional output
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class MessageItem(BaseModel):
    """A message of the conversation; further fields, as earlier responses have them, are ignored."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]

    def as_read(self) -> Message:
        """Return the turn as chat templates know it."""
        return ChatMessage(role=self.role, content=self.content).as_read()


class CallItem(BaseModel):
    """A tool call of an earlier response."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function_call"]
    call_id: Annotated[str, Field(max_length=256)]
    name: Name
    arguments: Arguments

    def as_read(self) -> Message:
        """Return the turn as chat templates know it."""
        call = Call(id=self.call_id, function=CalledFunction(name=self.name, arguments=self.arguments))
        return ChatMessage(role="assistant", content="", tool_calls=[call]).as_read()


class OutputItem(BaseModel):
    """The result of a tool call."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(max_length=256)]
    output: Text | list[TextPart]

    def as_read(self) -> Message:
        """Return the turn as chat templates know it."""
        return ChatMessage(role="tool", content=self.output, tool_call_id=self.call_id).as_read()


def _kind(item: object) -> str:
    """Return an item's `type`; default to `message`."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")],
    Discriminator(_kind),
]


class ResponseTool(BaseModel):
    """A function that the model may call; OpenAI's built-in tools are not supported."""

    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: Loose | None = None
    strict: bool | None = None


class TextFormat(BaseModel):
    """The format of the text; unlike in chat completions, a schema's fields are beside `type`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name | None = None
    description: Text | None = None
    schema_: Annotated[ReplySchema | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise Refusal("invalid_value", "schema belongs to the type json_schema, and that type needs it.")
        return self

    def reply_schema(self) -> Schema | None:
        """Return the JSON schema that the text is constrained to; None for any text."""
        return {"type": "object"} if self.type == "json_object" else self.schema_


class TextSettings(BaseModel):
    """Settings of the output text."""

    format: TextFormat | None = None


class ResponseCreate(LenientBody):
    """A conversation to continue. Responses are not kept, so `previous_response_id` is refused."""

    model: Name
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=10_000)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = None
    stream_options: Loose | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Loose | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    truncation: Literal["disabled"] | None = None
    store: bool | None = None
    background: Literal[False] | None = None
    previous_response_id: Name | None = None
    conversation: Name | Loose | None = None
    include: Annotated[list[Included], Field(max_length=10)] | None = None
    user: str | None = None  # not stored, as the fields below
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("include")
    @classmethod
    def _includes_what_is_there(cls, value: list[str] | None) -> list[str] | None:
        """Ignore output of reasoning and built-in tools, which no response here has; refuse logprobs."""
        if value and "message.output_text.logprobs" in value:
            raise Refusal("unsupported_parameter", "only chat completions return logprobs.", "include")
        return value

    @field_validator("previous_response_id", "conversation")
    @classmethod
    def _names_nothing(cls, value: Name | Loose | None) -> Name | Loose | None:
        if value is not None:
            raise Refusal("unsupported_parameter", "replies are not stored here; send all turns as input.")
        return value

    @model_validator(mode="after")
    def _is_written_here(self) -> Self:
        if self.store:
            raise Refusal("unsupported_parameter", "the provider decides what is stored here; leave it out.", "store")
        if self.tool_choice not in (None, "none", "auto"):
            raise Refusal("unsupported_parameter", "this engine supports only auto and none.", "tool_choice")
        if self.offered_tools and self.text and self.text.format and self.text.format.type != "text":
            raise Refusal("unsupported_parameter", "not beside tools here.", "text.format")
        return self

    @property
    def offered_tools(self) -> list[ResponseTool]:
        """The tools that the prompt shows to the model."""
        return [] if self.tool_choice == "none" else self.tools or []

    def ask(self) -> Ask:
        """Return the request in the form that an engine reads."""
        items = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        start: list[Message] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        tools = [each.model_dump(exclude_none=True, exclude={"type"}) for each in self.offered_tools]
        return {
            "adapter": None,
            "messages": [*start, *(item.as_read() for item in items)],
            "prompt": None,
            "tools": [{"type": "function", "function": each} for each in tools],
            "n": 1,
            "max_tokens": self.max_output_tokens,
            **choice(self.temperature, self.top_p),
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": None,
            "stop": [],
            "json_schema": self.text.format.reply_schema() if self.text and self.text.format else None,
            "top_logprobs": None,
            "as_ids": False,
        }


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
