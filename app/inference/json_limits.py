"""Refuse JSON from clients that is nested too deeply, and schemas that are too costly to compile, by their shape.

An engine intersects all patterns that apply to one string, and expands bounded repeats; the cost of both grows with the
product of their sizes. A schema that passes is still compiled under limits (`worker/engine/grammar.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator

from app.http.schemas import Refusal

# Refuse free-form JSON from clients, such as a schema, whose nesting or references are too deep to process.

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


_CHARACTERS = 256 << 10  # of a schema as JSON
_PATTERNS = 64  # in a whole schema
_PATTERNS_TOGETHER = 2  # that apply to one string at the same time
_REPEATS = 10_000  # the product of the bounds in one pattern
_PATTERN_CHARACTERS = 1000
_BOUNDS = re.compile(r"(?<!\\)\{(\d{1,9})(?:,(\d{0,9}))?\}")
_LISTS = ("allOf", "anyOf", "oneOf")
_INNER = ("not", "if", "then", "else")


def refuse_costly(schema: dict[str, object]) -> dict[str, object]:
    """Return the schema unchanged; raise `Refusal` if its size, patterns or repeats make it too costly to compile."""
    if len(json.dumps(schema)) > _CHARACTERS:
        _refuse(f"it has more than {_CHARACTERS >> 10} KiB; give shorter lists of values")
    patterns = list(_patterns(schema))
    if len(patterns) > _PATTERNS:
        _refuse(f"it has {len(patterns)} patterns, and at most {_PATTERNS} are taken; check strings after the reply")
    for pattern in patterns:
        if len(pattern) > _PATTERN_CHARACTERS:
            _refuse(f"a pattern has more than {_PATTERN_CHARACTERS} characters; make it shorter")
        if _repeats(pattern) > _REPEATS:
            _refuse(f"the repeats of a pattern multiply to more than {_REPEATS}; lower their bounds")
    if _together(schema) > _PATTERNS_TOGETHER:
        _refuse(
            f"more than {_PATTERNS_TOGETHER} patterns hold for one string (`allOf`, or beside it); write them as one "
            "pattern, or check the string after the reply"
        )
    return schema


def _refuse(why: str) -> None:
    raise Refusal("schema_too_costly", f"this schema is too costly to hold a reply to: {why}.")


def _patterns(value: object) -> Iterator[str]:
    """Yield every regular expression in a schema, including the keys of `patternProperties`."""
    for part in parts(value):
        if isinstance(pattern := part.get("pattern"), str):
            yield pattern
        if isinstance(names := part.get("patternProperties"), dict):
            yield from names


def _repeats(pattern: str) -> int:
    """Return the product of all repeat bounds in a pattern, an upper bound on its expansion if they are nested."""
    product = 1
    for least, most in _BOUNDS.findall(pattern):
        product *= max(1, int(least), int(most or 0))
        if product > _REPEATS:
            break
    return product


def _together(schema: dict[str, object]) -> int:
    """Return the largest number of patterns that apply to one string, following all references."""
    counted = _PatternCounter(schema, has_patterns=any(_patterns(schema)))
    try:
        return max((counted.patterns(part) for part in parts(schema)), default=0)
    except RecursionError:
        _refuse("its references lead too far into each other; write them out")
        return 0


class _PatternCounter:
    """Counts the patterns that a part of a schema applies to one value, with its references resolved.

    A reference that cannot be resolved counts as one pattern if the schema has any.
    """

    def __init__(self, schema: dict[str, object], has_patterns: bool) -> None:
        self._schema, self._unknown = schema, int(has_patterns)
        self._known = dict[int, int]()

    def patterns(self, part: dict[str, object]) -> int:
        """Return how many patterns a part applies to one value, including its references and combined schemas."""
        # A loop instead of recursion along `$ref`, so that a long chain of references does not exhaust the stack.
        chain, further, at = list[dict[str, object]](), 0, part
        while id(at) not in self._known:
            self._known[id(at)] = 0  # a reference back into the chain adds nothing
            chain.append(at)
            target = at.get("$ref")
            if not isinstance(target, str):
                break
            found = resolve(self._schema, target)
            if not isinstance(found, dict):
                further = self._unknown
                break
            at = found
        else:
            further = self._known[id(at)]
        for each in reversed(chain):
            further = min(further + self._inner_cost(each), _PATTERNS + 1)
            self._known[id(each)] = further
        return further

    def _inner_cost(self, part: dict[str, object]) -> int:
        """Return a part's patterns without those of its `$ref`: the sum over `allOf`, the maximum over alternatives."""
        total = int(isinstance(part.get("pattern"), str)) + int(isinstance(part.get("format"), str))
        for name in _LISTS:
            choices = part.get(name)
            inner = [each for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []
            counts = [self.patterns(each) for each in inner]
            total += sum(counts) if name == "allOf" else max(counts, default=0)
        return total + sum(self.patterns(each) for name in _INNER if isinstance(each := part.get(name), dict))


ReplySchema = Annotated[Schema, AfterValidator(refuse_costly)]
