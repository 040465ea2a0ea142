"""Request bodies of chat and text completions, in OpenAI's format; unsupported fields that matter are refused.

Messages of chat requests are converted to the form that chat templates take.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypedDict

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from app.http.schemas import Body, LenientBody, Refusal
from app.inference.json_limits import Loose, ReplySchema, Schema
from app.inference.protocol import Ask, Message
from spard.data import jsonl

Text = Annotated[str, Field(max_length=1 << 20)]
Name = Annotated[str, Field(min_length=1, max_length=512)]
Stop = Annotated[str, Field(max_length=1000)]


def _json(arguments: str) -> str:
    try:
        jsonl.parse_json(arguments)
    except ValueError as error:
        raise Refusal("invalid_value", f"it must be JSON: {error}.") from None
    return arguments


Arguments = Annotated[Text, AfterValidator(_json)]


class TextPart(BaseModel):
    """A text part of a message; images, audio and files are not supported."""

    type: Literal["text", "input_text", "output_text"]
    text: Text


class CalledFunction(BaseModel):
    """The function that an earlier turn called, with its arguments as JSON text."""

    name: Name
    arguments: Arguments


class Call(BaseModel):
    """A tool call of an earlier turn."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """One turn; fields that earlier answers also have (`refusal`, `annotations`) are ignored."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | list[TextPart] | None = None
    name: Name | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: list[Call] | None = None
    function_call: CalledFunction | None = None  # OpenAI's older form of `tool_calls`, with one call

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        """Refuse a turn without content: a mistyped field name must not become an empty turn."""
        if self.content is None and self.role != "assistant":
            raise Refusal("missing_field", f"a turn of the role {self.role!r} needs content.", "content")
        return self

    def as_read(self) -> Message:
        """Return the turn as chat templates take it, with its text parts joined."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        message: Message = {"role": self.role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        elif self.function_call:
            message["tool_calls"] = [{"type": "function", "function": self.function_call.model_dump()}]
        return message


class FunctionTool(BaseModel):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Name
    description: Text | None = None
    parameters: Loose | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool that the model may use."""

    type: Literal["function"]
    function: FunctionTool


class StreamOptions(Body):
    """What a streamed reply sends beside its pieces, in OpenAI's form."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(BaseModel):
    """A named JSON schema; replies always follow it, even if `strict` is false."""

    name: Name | None = None
    description: Text | None = None
    schema_: Annotated[ReplySchema, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The format of a reply."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise Refusal("invalid_value", "json_schema belongs to the type json_schema, and that type needs it.")
        return self

    def reply_schema(self) -> Schema | None:
        """Return the JSON schema that the reply is constrained to; None for text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class Choice(TypedDict):
    """Temperature and `top_p` of an engine's request."""

    temperature: float
    top_p: float


def choice(temperature: float | None, top_p: float | None) -> Choice:
    """Return temperature and `top_p` for an engine, 1 by default; a `top_p` of 0 becomes temperature 0, greedy."""
    if top_p == 0:
        return {"temperature": 0.0, "top_p": 1.0}
    return {"temperature": 1.0 if temperature is None else temperature, "top_p": 1.0 if top_p is None else top_p}


class Sampling(LenientBody):
    """The fields that chat and text completions share: sampling, stops and stream options."""

    model: Name
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Loose | None = None
    user: str | None = None  # not stored, as the fields below
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _is_done_here(self) -> Self:
        if self.logit_bias:
            raise Refusal("unsupported_parameter", "it is not supported here.", "logit_bias")
        if self.store:
            raise Refusal("unsupported_parameter", "the provider decides what is stored here; leave it out.", "store")
        return self

    def engine_ask(self) -> Ask:
        """Return the engine's request with the shared fields set; the endpoint adds its own."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return {
            "adapter": None,
            "messages": None,
            "prompt": None,
            "tools": [],
            "n": self.n or 1,
            "max_tokens": None,
            **choice(self.temperature, self.top_p),
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "seed": self.seed,
            "stop": stop,
            "json_schema": None,
            "top_logprobs": None,
            "as_ids": False,
        }

    @property
    def includes_usage(self) -> bool:
        """Return True if a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatCreate(Sampling):
    """A conversation to continue."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Loose | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _is_written_here(self) -> Self:
        if self.offered_tools and self.response_format and self.response_format.type != "text":
            raise Refusal("unsupported_parameter", "not beside tools here.", "response_format")
        if self.tool_choice not in (None, "none", "auto"):
            raise Refusal("unsupported_parameter", "this engine supports only auto and none.", "tool_choice")
        if self.top_logprobs and not self.logprobs:
            raise Refusal("invalid_value", "it needs logprobs.", "top_logprobs")
        return self

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the prompt shows to the model."""
        return [] if self.tool_choice == "none" else self.tools or []

    def ask(self) -> Ask:
        """Return the request in the form that an engine reads."""
        ask = self.engine_ask()
        ask["messages"] = [message.as_read() for message in self.messages]
        ask["tools"] = [tool.model_dump(exclude_none=True) for tool in self.offered_tools]
        ask["max_tokens"] = self.max_completion_tokens or self.max_tokens
        ask["json_schema"] = self.response_format.reply_schema() if self.response_format else None
        if self.logprobs:
            ask["top_logprobs"] = self.top_logprobs or 0
        return ask


class CompletionCreate(Sampling):
    """A text to continue, without a chat template."""

    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _is_one_text(cls, prompt: object) -> object:
        if isinstance(prompt, list) and (len(prompt) > 1 or not all(isinstance(text, str) for text in prompt)):
            raise Refusal("unsupported_parameter", "send one text; several texts and token ids are not supported.")
        return prompt

    @model_validator(mode="after")
    def _weighs_no_prompt(self) -> Self:
        """Refuse `echo` with `logprobs`: logprobs of prompt tokens are not computed, and zeros look like certainty."""
        if self.echo and self.logprobs is not None:
            raise Refusal("unsupported_parameter", "logprobs cover new tokens only; leave echo out.", "echo")
        return self

    def ask(self) -> Ask:
        """Return the request in the form that an engine reads."""
        ask = self.engine_ask()
        ask["prompt"] = self.prompt if isinstance(self.prompt, str) else self.prompt[0]
        ask["max_tokens"], ask["top_logprobs"] = self.max_tokens or 16, self.logprobs
        return ask


class Moderation(BaseModel):
    """Texts for the provider's moderation endpoint; without `model` it uses its own."""

    model: Name | None = None
    input: Text | Annotated[list[Text | Loose], Field(max_length=1000)]
