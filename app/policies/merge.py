"""Merge what a request names into the policy in force, and tell what that changed."""

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

# `null` is a value here, and not a return to the deployment's setting: no drop is too large.
_NULL_MEANS_NO_BOUND = {each.name for each in fields(GateThresholds) if each.default is None}


class PolicyChange(RootModel[Json]):
    """The fields of a policy that a request names; a part of a policy may be no policy by itself."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(Policy.__pydantic_core_schema__)


class ChangedField(BaseModel):
    """A field of a policy that a new version changed, such as `thresholds.max_asr`; null: there was or is none."""

    field: str
    was: JsonValue
    now: JsonValue


class PolicyAdded(PolicyOut):
    """A version that was put in force, and how it differs from the version before it."""

    changes: list[ChangedField]


def merge(policy: Policy, change: PolicyChange, gate: GateThresholds) -> Policy:
    """Return the policy with what a change names, as JSON Merge Patch (RFC 7396) has it.

    Objects are merged field by field, lists are replaced, and `null` takes a field back to its default (for
    `thresholds`, that of `gate`). Raise `InvalidRequest` if the result is no policy.
    """
    merged = _apply_patch(policy.model_dump(mode="json"), change.root)
    thresholds, named = merged.get("thresholds"), change.root.get("thresholds")
    if isinstance(thresholds, dict) and isinstance(named, dict):
        unbounded = {name for name in _NULL_MEANS_NO_BOUND if name in named and named[name] is None}
        thresholds |= dict.fromkeys(unbounded)
    return read(Policy, merged).with_defaults(gate)


def changed_fields(before: Policy, after: Policy) -> list[ChangedField]:
    """Return the fields in which two policies differ; objects are compared field by field, lists as a whole."""
    return list(_differences("", before.model_dump(mode="json"), after.model_dump(mode="json")))


def _apply_patch(value: Any, patch: Mapping[str, JsonValue], place: str = "") -> Json:
    """Apply a merge patch; a `null` for a name that is not there stays, so that a misspelled name is refused."""
    found: Json = dict(value) if isinstance(value, dict) else {}
    for name, given in patch.items():
        if isinstance(given, dict):
            found[name] = _apply_patch(found.get(name), given, name)
        elif given is None and name in found:
            del found[name]
        elif given is not None or place != "ranges" or not _is_setting(name):
            found[name] = given
    return found


def _is_setting(name: str) -> bool:
    """Return whether a job has such a setting: one without bounds has none to be taken away."""
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
