"""Types that the requests and answers of every domain share."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

# A time that stands in an answer as whole Unix seconds, as in OpenAI's API.
UnixTime = Annotated[
    datetime, PlainSerializer(lambda at: int(at.timestamp()), return_type=int), WithJsonSchema({"type": "integer"})
]


def _without_default(schema: dict[str, Any]) -> None:
    schema.pop("default", None)


# For a field that OpenAI's schema lets be absent and never null: without a value it is left out of the answer.
Absent = Field(exclude_if=lambda value: value is None, json_schema_extra=_without_default)


@cache
def _is_number(body: type[BaseModel], field: str | None) -> bool:
    """Return whether a field takes a number and no boolean."""
    kinds = list(_kinds(body.model_fields[field].annotation)) if field else []
    return bool not in kinds and not {int, float}.isdisjoint(kind for kind in kinds if isinstance(kind, type))


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield the types that a value may have."""
    if get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for each in get_args(annotation):
            yield from _kinds(each)
    else:
        yield annotation


class Body(BaseModel):
    """A request body: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and _is_number(cls, info.field_name):
            raise ValueError("Input should be a number, not true or false.")
        return value


class LenientBody(Body):
    """A request body in which an unknown field may be null, as clients send what is not set: it asks for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: object) -> object:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None or name in cls.model_fields}


class Refusal(ValueError):
    """A value of the right type that a validator refuses, with the error code that the client gets.

    A validator of a whole object names the field in it as `param`.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
