"""Define types that the requests and answers of all domains share."""

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

# A time that answers show as whole Unix seconds, as in OpenAI's API.
UnixTime = Annotated[
    datetime, PlainSerializer(lambda at: int(at.timestamp()), return_type=int), WithJsonSchema({"type": "integer"})
]


def _without_default(schema: dict[str, Any]) -> None:
    schema.pop("default", None)


# For a field that is absent but never null in OpenAI's schema: answers leave it out if it is None.
Absent = Field(exclude_if=lambda value: value is None, json_schema_extra=_without_default)


@cache
def _is_number(body: type[BaseModel], field: str | None) -> bool:
    """Return True if a field accepts numbers but no booleans."""
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
    """A request body that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic takes true as 1 and false as 0.
        if isinstance(value, bool) and _is_number(cls, info.field_name):
            raise ValueError("Input should be a number, not true or false.")
        return value


class LenientBody(Body):
    """A request body that ignores unknown fields whose value is null, which some clients send for unset fields."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: object) -> object:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None or name in cls.model_fields}


class Refusal(ValueError):
    """Raised by a validator to refuse a value of the right type with an error code for the client.

    A validator of a whole object names the faulty field as `param`.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
