"""Messages of chat requests, and their conversion to the form that chat templates take."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from app.http.schemas import Refusal
from app.inference.protocol import Message
from spard.data import strict_json

Text = Annotated[str, Field(max_length=1 << 20)]
Name = Annotated[str, Field(min_length=1, max_length=512)]


def _json(arguments: str) -> str:
    try:
        strict_json.parse(arguments)
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
