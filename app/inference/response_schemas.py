"""Request bodies of `/v1/responses`, in OpenAI's format."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from app.http.schemas import LenientBody, Refusal
from app.inference.json_limits import Loose, ReplySchema, Schema
from app.inference.protocol import Ask, Message
from app.inference.schemas import Arguments, Call, CalledFunction, ChatMessage, Name, Text, TextPart, choice

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
