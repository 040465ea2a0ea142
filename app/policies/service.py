"""Store policy versions: rows are added and never changed; the newest is in force, and requests may change parts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

from pydantic import BaseModel, GetJsonSchemaHandler, JsonValue, RootModel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app import audit_log, db
from app.db.tables import BaseModelEntry, PolicyVersion
from app.db.tables.job_spec import PolicyRef
from app.errors import InvalidRequest
from app.http.validation_errors import read
from app.objects import served_adapters
from app.policies.schemas import Policy, PolicyOut, ServingRules
from app.settings import Settings
from spard.config import GateThresholds, RowSignal
from spard.config.settings import OWN_EMBEDDERS
from spard.models.folder.encoder import UnfitEmbedder, read_encoder

# The values of thresholds in versions stored before these existed.
_BEFORE_BOUNDS = {
    name: getattr(PolicyRef(), name)
    for name in ("confidence", "max_dressed_refusal_rise", "max_shown_asr_rise", "max_dressed_asr")
}
_REPORTED = RowSignal("report")  # the behavior of a version without a row signal
_READS_NONE = {"read": 0}  # the behavior of a version without `row_signal.read`


class _StoredVersion(NamedTuple):
    """The columns of a stored version."""

    version: int
    created_at: datetime
    created_by: str
    content: Json


_VERSIONS = select(*(getattr(PolicyVersion, name) for name in _StoredVersion._fields)).order_by(
    PolicyVersion.version.desc()
)
_ALL = db.PreparedStatement(_VERSIONS, _StoredVersion._make)
_NEWEST = db.PreparedStatement(_VERSIONS.limit(1), _StoredVersion._make)


def current(session: Session, settings: Settings) -> PolicyOut:
    """Return the version in force; without any stored version, the deployment's settings as version 0."""
    newest = _NEWEST.one(session)
    return _policy_response(newest) if newest else _default_policy(settings)


def serving(session: Session) -> ServingRules:
    """Return how models answer under the version in force; the deployment's settings have no part in it."""
    newest = _NEWEST.one(session)
    return ServingRules.model_validate(newest.content.get("serving", {})) if newest else ServingRules()


def versions(session: Session, settings: Settings) -> list[PolicyOut]:
    """Return every version, newest first, ending with version 0."""
    return [*(_policy_response(each) for each in _ALL.all(session)), _default_policy(settings)]


def add(session: Session, key_id: str, policy: Policy) -> PolicyOut:
    """Add a version, which applies to all jobs created from now on; adapters of paused models are unloaded."""
    policy = check(session, policy)
    last = session.scalar(select(func.max(PolicyVersion.version))) or 0
    added = PolicyVersion(version=last + 1, created_by=key_id, content=_stored_content(policy))
    session.add(added)
    session.flush()
    served_adapters.condemn_models(session, policy.serving.paused)
    audit_log.record(session, "policy.added", f"policy-{added.version}", content=added.content)
    return _policy_response(added)


def requested_policy(session: Session, settings: Settings, change: PolicyChange, replaces: bool) -> Policy:
    """Return the requested policy: the policy in force with a change applied, or only the change if `replaces`.

    Raises `InvalidRequest` if the result is not a valid policy.
    """
    if replaces:
        return read(Policy, change.root).with_defaults(settings.gate)
    return merge(current(session, settings).content, change, settings.gate)


def put_in_force(
    session: Session, settings: Settings, key_id: str, change: PolicyChange, replaces: bool
) -> PolicyAdded:
    """Add the requested version and return it with the changed fields; see `requested_policy`."""
    before = current(session, settings).content
    added = add(session, key_id, requested_policy(session, settings, change, replaces))
    return PolicyAdded(**dict(added), changes=changed_fields(before, added.content))


def check(session: Session, policy: Policy) -> Policy:
    """Return a policy in the form in which it is stored.

    Raises `InvalidRequest` if it names a model that is not offered or an invalid embedder.
    """
    offered = set(session.scalars(select(BaseModelEntry.alias)))
    for alias in policy.models or ():
        if alias not in offered:
            message = f"The model {alias[:128]!r} is not offered; offered: {', '.join(sorted(offered)) or 'none yet'}."
            raise InvalidRequest(message, code="model_not_found", param="models")
    if policy.embedder is None:
        return policy
    return policy.model_copy(update={"embedder": checked_embedder(policy.embedder, "embedder")})


def reference(policy: PolicyOut) -> PolicyRef:
    """Return the reference to a version that a job stores."""
    content = policy.content
    return PolicyRef(**asdict(content.thresholds), version=policy.version, waivers=content.waivers)


def _stored_content(policy: Policy) -> dict[str, object]:
    """Serialize a policy, omitting default-valued fields that older API processes reject."""
    content: dict[str, object] = policy.model_dump(mode="json")
    unsaid = {
        name: getattr(Policy(), name)
        for name in ("agent", "audit", "embedder", "further_tuning", "serving", "transcripts")
    }
    for name, value in (unsaid | {"row_signal": _REPORTED}).items():
        # An API process of an older version, running at the same time, refuses fields that it does not know.
        if getattr(policy, name) == value:
            del content[name]
    if not policy.thresholds.correct_judge_errors:
        del cast(dict[str, object], content["thresholds"])["correct_judge_errors"]
    if "serving" in content:
        content["serving"] = policy.serving.model_dump(mode="json", exclude_defaults=True)
    return content


def _policy_response(stored: PolicyVersion | _StoredVersion) -> PolicyOut:
    """Return a stored version; fields missing in an old version get the values it was decided with."""
    thresholds = cast(dict[str, object], stored.content.get("thresholds", {}))
    signal = cast(dict[str, object], stored.content.get("row_signal", asdict(_REPORTED)))
    content = stored.content | {"row_signal": _READS_NONE | signal, "thresholds": _BEFORE_BOUNDS | thresholds}
    return PolicyOut(
        version=stored.version,
        created_at=stored.created_at,
        created_by=stored.created_by,
        content=Policy.model_validate(content),
    )


def _default_policy(settings: Settings) -> PolicyOut:
    return PolicyOut(version=0, created_at=None, created_by=None, content=Policy(thresholds=settings.gate))


# Validate an embedder's name: the base model's states, or a sentence encoder of the provider's.

_PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?@[0-9a-f]{40}")


def checked_embedder(given: str, param: str) -> str:
    """Return an embedder in the form in which workers open it; a folder is checked and made absolute.

    Raises `InvalidRequest` about `param` for anything else, with the accepted forms.
    """
    if given in OWN_EMBEDDERS:
        return given
    folder = Path(given).expanduser()
    try:
        is_folder = "\0" not in given and folder.is_dir()
    except (OSError, RuntimeError):  # the name is too long, or ~user does not exist
        is_folder = False
    if is_folder:
        try:
            read_encoder(folder)
        except UnfitEmbedder as error:
            raise InvalidRequest(f"{error.message}.", code="invalid_embedder", param=param) from None
        return str(folder.resolve())
    if not _PINNED.fullmatch(given):
        own = " or ".join(OWN_EMBEDDERS[1:])
        message = (
            f"There is no folder {given[:200]!r} here. Give {own}, the folder of a sentence encoder, or its id on a "
            "hub with the commit, as org/name@ and 40 hex digits."
        )
        raise InvalidRequest(message, code="invalid_embedder", param=param)
    return given


# Merge a request's changes into the policy in force, and list the changed fields.

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
