"""Merge a request's changes into the policy in force, and list the changed fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from pydantic import BaseModel, GetJsonSchemaHandler, JsonValue, RootModel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from app.http.validation_errors import read
from app.policies.schemas import Policy, PolicyOut
from spard.config import GateThresholds

Json = dict[str, JsonValue]

# For these fields `null` is a value (no limit), and does not reset to the deployment's setting.
_NULL_MEANS_NO_BOUND = {each.name for each in fields(GateThresholds) if each.default is None}


class PolicyChange(RootModel[Json]):
    """The policy fields that a request sets; they need not form a complete policy."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(Policy.__pydantic_core_schema__)


class ChangedField(BaseModel):
    """A policy field that a new version changed, such as `thresholds.max_asr`; null if it was or is unset."""

    field: str
    was: JsonValue
    now: JsonValue


class PolicyAdded(PolicyOut):
    """A version that was put in force, and its differences from the previous version."""

    changes: list[ChangedField]


def merge(policy: Policy, change: PolicyChange, gate: GateThresholds) -> Policy:
    """Return the policy with a change applied by the rules of JSON Merge Patch (RFC 7396).

    Objects are merged field by field, lists are replaced, and `null` resets a field to its default (for `thresholds`,
    to that of `gate`). Raises `InvalidRequest` if the result is not a valid policy.
    """
    merged = _apply_patch(policy.model_dump(mode="json"), change.root)
    thresholds, named = merged.get("thresholds"), change.root.get("thresholds")
    if isinstance(thresholds, dict) and isinstance(named, dict):
        unbounded = {name for name in _NULL_MEANS_NO_BOUND if name in named and named[name] is None}
        thresholds |= dict.fromkeys(unbounded)
    return read(Policy, merged).with_defaults(gate)


def changed_fields(before: Policy, after: Policy) -> list[ChangedField]:
    """Return the fields in which two policies differ; objects are compared by field, lists as a whole."""
    return list(_differences("", before.model_dump(mode="json"), after.model_dump(mode="json")))


def _apply_patch(value: Any, patch: Mapping[str, JsonValue], place: str = "") -> Json:
    """Apply a merge patch; a `null` for an unknown name is kept, so that validation refuses misspelled names."""
    found: Json = dict(value) if isinstance(value, dict) else {}
    for name, given in patch.items():
        if isinstance(given, dict):
            found[name] = _apply_patch(found.get(name), given, name)
        # RFC 7396: `null` removes the field, which then gets its default.
        elif given is None and name in found:
            del found[name]
        elif given is not None or place != "ranges" or not _is_setting(name):
            found[name] = given
    return found


def _is_setting(name: str) -> bool:
    """Return True if a job has this setting: removing the absent range of a real setting is no error."""
    try:
        Policy.model_validate({"ranges": {name: {}}})
    except ValueError:
        return False
    return True


def _differences(place: str, was: Any, now: Any) -> Iterator[ChangedField]:
    if isinstance(was, dict) and isinstance(now, dict):
        for name in sorted({*was, *now}):
            yield from _differences(f"{place}.{name}" if place else name, was.get(name), now.get(name))
    elif was != now:
        yield ChangedField(field=place, was=was, now=now)
