"""Refuse free-form JSON from clients, such as a schema, whose nesting or references are too deep to process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator

from app.http.schemas import Refusal

_DEEPEST = 64  # levels: deeper JSON may be parsed but then fail to serialize, and no schema needs it
_FOLLOWED = 1000  # levels of a schema with all its references, which compilers follow recursively
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_PLAIN = re.compile(r"#(/[^/%~]{1,512})*")  # the target of any other reference counts as deep as the whole schema


def _not_too_deep(value: dict[str, object]) -> dict[str, object]:
    level: list[object] = [value]
    for _ in range(_DEEPEST):
        parts = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [part for each in parts for part in each]
    if any(isinstance(each, dict | list) for each in level):
        raise Refusal("nesting_too_deep", f"values are nested deeper than {_DEEPEST} levels.")
    return value


def _not_too_far(schema: dict[str, object]) -> dict[str, object]:
    """Refuse a schema whose chain of references is so deep that compiling it overflows the stack."""
    depths = dict[int, int]()
    whole = _measure(schema, depths)
    found = list(parts(schema))
    targets = {target for part in found for target in _references(part)}
    is_moved = any("$id" in part for part in found)  # `$id` changes the base of relative references
    followed = whole + sum(depths.get(id(None if is_moved else resolve(schema, each)), whole) for each in targets)
    if targets and followed > _FOLLOWED:
        message = f"the schema and all that it refers to are {followed} levels deep; at most {_FOLLOWED} are followed."
        raise Refusal("nesting_too_deep", message)
    return schema


Loose = Annotated[dict[str, object], AfterValidator(_not_too_deep)]
Schema = Annotated[Loose, AfterValidator(_not_too_far)]


def _measure(value: object, depths: dict[int, int]) -> int:
    """Return a value's depth, and store in `depths` the depth of each object and list in it, by id."""
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    depths[id(value)] = found = 1 + max((_measure(each, depths) for each in inner), default=0)
    return found


def parts(value: object) -> Iterator[dict[str, object]]:
    """Yield every JSON object in a value, including the value itself."""
    left = [value]
    while left:
        match left.pop():
            case dict(fields):
                yield fields
                left += fields.values()
            case list(items):
                left += items


def _references(part: dict[str, object]) -> Iterator[str]:
    yield from (target for name in _REFERENCES if isinstance(target := part.get(name), str))


def resolve(schema: dict[str, object], target: str) -> object:
    """Return the target of a reference; None if it does not exist or is not a plain path from the schema's root."""
    found: object = schema if _PLAIN.fullmatch(target) else None
    for name in target.split("/")[1:]:
        match found:
            case dict(fields):
                found = fields.get(name)
            case list(items) if name.isdecimal() and int(name) < len(items):
                found = items[int(name)]
            case _:
                return None
    return found
