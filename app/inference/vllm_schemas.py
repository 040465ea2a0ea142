"""Refuse schemas of which a vLLM server with its default engine for schemas, xgrammar, enforces only a part.

xgrammar follows one of `$ref`, `enum`, `anyOf` and `oneOf` and ignores what stands beside it. It also ignores `allOf`
of several schemas, a bound without a `type`, and keys of `required` without a schema (measured on version 0.2.8).
"""

from __future__ import annotations

from collections.abc import Iterator

from app.errors import InvalidRequest

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_LEADING = ("$ref", "enum", "anyOf", "oneOf", "allOf")
_BOUNDS = (
    *("pattern", "format", "minLength", "maxLength", "minItems", "maxItems"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
_OTHERS = ("properties", "required", "patternProperties", "additionalProperties", "items", "prefixItems")


def refuse_unenforced(schema: dict[str, object]) -> None:
    """Raise `InvalidRequest` if xgrammar would ignore a part of the schema.

    It is raised as well if the schema sets options of llguidance, some servers' engine: they can turn keywords off.
    """
    if "x-guidance" in schema:
        message = "`x-guidance` is no keyword of JSON Schema; leave it out."
        raise InvalidRequest(message, code="invalid_json_schema", param="response_format")
    for part in _subschemas(schema):
        if why := _find_ignored(part):
            message = f"The server would ignore a part of this schema: {why}."
            raise InvalidRequest(message, code="invalid_json_schema", param="response_format")


def _subschemas(schema: dict[str, object]) -> Iterator[dict[str, object]]:
    """Yield the schema and every schema in it, but no object that is a value, as in `enum` or `examples`."""
    yield schema
    inner: list[object] = [schema.get(name) for name in _SINGLE]
    for name in _MAPS:
        named = schema.get(name)
        inner += named.values() if isinstance(named, dict) else []
    for name in _LISTS:
        listed = schema.get(name)
        inner += listed if isinstance(listed, list) else []
    for each in inner:
        if isinstance(each, dict):
            yield from _subschemas(each)


def _find_ignored(part: dict[str, object]) -> str | None:
    """Return what the server would ignore in one schema and the way around it; None if it enforces all of it."""
    leading = [name for name in _LEADING if name in part]
    bounds = [name for name in _BOUNDS if name in part]
    all_of, required, properties = part.get("allOf"), part.get("required"), part.get("properties")
    if isinstance(all_of, list) and len(all_of) > 1:
        return "`allOf` of several schemas; merge them into one"
    if leading and (beside := [*leading[1:], *bounds, *(name for name in _OTHERS if name in part)]):
        return f"`{beside[0]}` beside `{leading[0]}`; merge the two"
    if bounds and "type" not in part and "const" not in part:
        return f"`{bounds[0]}` without a `type`"
    named = properties if isinstance(properties, dict) else {}
    if isinstance(required, list) and (missing := [each for each in required if str(each) not in named]):
        return f"{missing[0]!r} in `required`, which is not in `properties`"
    return None
