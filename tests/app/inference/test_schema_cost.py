"""Schemas are refused by their shape before anything compiles them, and the param is named."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from app.inference.json_limits import ReplySchema
from app.inference.schemas import ChatCreate

WORD = {"type": "string", "pattern": "^[a-z]+$"}
READER: TypeAdapter[Any] = TypeAdapter(ReplySchema)


def words(count: int) -> list[dict[str, Any]]:
    return [{"pattern": f"^w{i}"} for i in range(count)]


REFERRED = {"$defs": {f"w{i}": each for i, each in enumerate(words(3))}}
COSTLY = {
    "patterns under allOf": {"properties": {"a": {"type": "string", "allOf": words(3)}}},
    "beside and under allOf": {"type": "string", "pattern": "a", "format": "date", "allOf": words(1)},
    "under allOf of allOf": {"allOf": [{"allOf": words(2)}, {"anyOf": words(1)}]},
    "by references": REFERRED | {"allOf": [{"$ref": f"#/$defs/w{i}"} for i in range(3)]},
    "by references that are spelled otherwise": REFERRED | {"allOf": [{"$ref": f"#/%24defs/w{i}"} for i in range(3)]},
    "patterns everywhere": {"properties": {f"p{i}": WORD for i in range(65)}},
    "names": {"patternProperties": {f"^{i}": {} for i in range(65)}},
    "nested repeats": {"pattern": "^((a{100}){20}){6}$"},
    "a large repeat": {"pattern": "^a{2,20000}$"},
    "a long pattern": {"pattern": "a" * 1001},
    "many values": {"enum": ["x" * 100] * 3000},
}
CHEAP = {
    "one pattern for each property": {"properties": {f"p{i}": WORD for i in range(64)}},
    "choices": {"anyOf": words(20)},
    "a pattern under allOf": {"allOf": [{"type": "string"}, WORD]},
    "a circle": {"$defs": {"a": {"properties": {"b": {"$ref": "#/$defs/a"}}, "pattern": "x"}}, "$ref": "#/$defs/a"},
    "one pattern referred to often": {
        "$defs": {"w": WORD},
        "properties": {f"p{i}": {"$ref": "#/$defs/w"} for i in range(99)},
    },
    "braces that repeat nothing": {"pattern": r"^\{99999\}$"},
    "a property called pattern": {"properties": {"pattern": {"type": "string"}, "allOf": {"type": "array"}}},
}


@pytest.mark.parametrize("schema", COSTLY.values(), ids=COSTLY)
def test_costly_shapes_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="too costly"):
        READER.validate_python(schema)


@pytest.mark.parametrize("schema", CHEAP.values(), ids=CHEAP)
def test_others_are_taken(schema: dict[str, Any]) -> None:
    assert READER.validate_python(schema) == schema


def test_the_field_of_a_chat_request_is_named() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": COSTLY["by references"]}}
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "response_format": form}
    with pytest.raises(ValidationError) as refused:
        ChatCreate.model_validate(ask)
    (error,) = refused.value.errors()
    assert error["loc"] == ("response_format", "json_schema", "schema")
    assert error["ctx"]["error"].code == "schema_too_costly"
