"""Null means absent: removes the keys without a value when rows are read.

Arrow gives each record all keys of all records, and `model_dump()` of an API message includes every field of its class,
which leaves most keys of such rows null. All code that checks, counts, shows or trains on rows reads them through here.
"""

from __future__ import annotations

from typing import Any

_EMPTY = frozenset({"tool_calls", "annotations"})  # message fields for which servers send [] instead of omitting them
_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_NULL_VALUES = ("default", "const")
_VALUES = frozenset({*_NULL_VALUES, "enum", "examples"})  # JSON schema keywords whose values are data


def may_have_nulls(text: str) -> bool:
    """Return True, after a quick test, if the row's JSON may contain a value that `without_nulls` removes."""
    return "null" in text or "[]" in text


def without_nulls(value: Any) -> Any:
    """Return a row without null keys, at any depth.

    List entries stay, as do nulls that are values in a tool's JSON schema: in `enum`, `examples`, `default` and
    `const`. A null `default` or `const` beside other null keywords is kept only if the schema accepts null, because
    Arrow has filled such a schema with nulls.
    """
    if isinstance(value, dict):
        return {
            key: _schema(item) if key == "parameters" and isinstance(item, dict) else without_nulls(item)
            for key, item in value.items()
            if item is not None and not (key in _EMPTY and item == [])
        }
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    # A null under another keyword is never written by hand, so it shows that Arrow has filled the schema.
    is_filled_up = any(item is None and key not in _NULL_VALUES for key, item in schema.items())
    keeps_null = not is_filled_up or _accepts_null(schema)
    return {
        key: item if key in _VALUES else _nested_schemas(key, item)
        for key, item in schema.items()
        if item is not None or (key in _NULL_VALUES and keeps_null)
    }


def _nested_schemas(keyword: str, item: Any) -> Any:
    """Return the value of a schema keyword: schemas by name, one schema, a list of them, or plain values."""
    if isinstance(item, list):
        return [_schema(each) if isinstance(each, dict) else each for each in item]
    if not isinstance(item, dict):
        return item
    if keyword not in _SCHEMAS_BY_NAME:
        return _schema(item)
    return {name: _nested_schemas("", each) for name, each in item.items() if each is not None}


def _accepts_null(schema: dict[str, Any]) -> bool:
    types = schema.get("type")
    options = [each for key in ("anyOf", "oneOf") for each in schema.get(key) or [] if isinstance(each, dict)]
    return types == "null" or (isinstance(types, list) and "null" in types) or any(map(_accepts_null, options))
