"""Schemas that vLLM's default engine enforces in part are refused, and the schemas that pydantic writes are not."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from app.errors import InvalidRequest
from app.inference.vllm_writing import refuse_unenforced


class Item(BaseModel):
    """An item, described beside its reference."""

    kind: Literal["a", "b"]
    count: Annotated[int, Field(gt=0)] | None = None
    pattern: str = ""
    enum: str = ""


class Order(BaseModel):
    first: Annotated[Item, Field(description="The first.")]
    others: Annotated[list[Item], Field(max_length=3)]


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"allOf": [{"type": "object"}, {"required": ["a"]}]}, "`allOf` of several"),
        ({"items": {"$ref": "#/$defs/a", "maxLength": 2}}, "`maxLength` beside `\\$ref`"),
        ({"enum": ["a", "bcd"], "minLength": 2}, "`minLength` beside `enum`"),
        ({"type": "object", "anyOf": [{"required": ["a"]}], "required": ["b"]}, "`required` beside `anyOf`"),
        ({"anyOf": [{"type": "object"}], "$ref": "#/$defs/a"}, "`anyOf` beside `\\$ref`"),
        ({"type": "object", "anyOf": [{"type": "object"}], "properties": {}}, "`properties` beside `anyOf`"),
        ({"$defs": {"a": {"type": "object", "required": ["a"]}}}, "'a' in `required`"),
        ({"properties": {"a": {"minLength": 2}}}, "`minLength` without"),
        ({"type": "array", "items": [{"type": "string"}, {"minLength": 2}]}, "`minLength` without"),
        ({"type": "array", "items": [], "additionalItems": {"minLength": 2}}, "`minLength` without"),
        ({"type": "string", "pattern": "^https://"}, "that '\\^https://' may match a part"),
        ({"properties": {"a": {"type": "string", "pattern": "[0-9]$"}}}, "may match a part"),
        ({"type": "string", "pattern": "^costs 5\\$"}, "may match a part"),
        ({"type": "string", "pattern": "^ja|nein$"}, "may match a part"),
        ({"type": "string", "pattern": "^[(]a|(b)$"}, "may match a part"),
        ({"type": "object", "patternProperties": {"^x-": {"type": "string"}}}, "may match a part"),
        ({"type": "object", "propertyNames": {"type": "string", "pattern": "x"}}, "may match a part"),
        ({"type": "string", "format": "date", "pattern": "^2.*$"}, "`pattern` beside `format`"),
        ({"type": "integer", "not": {"const": 5}}, "`not`; leave it out"),
        ({"items": {"if": {"type": "integer"}, "then": {"minimum": 7}}}, "`if`; leave it out"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "`dependentRequired`; leave it out"),
        ({"$ref": "#/$defs/a", "dependentSchemas": {"a": {"required": ["b"]}}}, "`dependentSchemas`; leave it out"),
        ({"type": "object", "x-guidance": {"whitespace_flexible": True}}, "`x-guidance` is no keyword"),
    ],
)
def test_a_schema_that_is_enforced_in_part_is_refused(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as refused:
        refuse_unenforced(schema)
    assert (refused.value.code, refused.value.param) == ("invalid_json_schema", "response_format")


def test_schemas_of_pydantic_are_taken() -> None:
    refuse_unenforced(Order.model_json_schema())
    refuse_unenforced({"allOf": [{"$ref": "#/$defs/a"}], "description": "one schema is enforced"})
    refuse_unenforced({"type": "object", "patternProperties": {"^x-.*$": {"type": "string", "pattern": "^[0-9]+$"}}})
    refuse_unenforced({"properties": {"not": {"type": "string"}, "if": {"type": "string", "format": "date"}}})
    for pattern in ("^(ja|nein)$", "^[|]$", r"^a\|b$", r"^C:\\$", "^$"):
        refuse_unenforced({"type": "string", "pattern": pattern})
    refuse_unenforced({"enum": [{"format": "pdf"}], "examples": [{"minimum": 2, "required": ["a"]}]})
