"""Store policy versions: rows are added and never changed; the newest is in force."""

from __future__ import annotations

from dataclasses import asdict
from typing import cast

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.audit_log import service as audit_log
from app.db.tables import BaseModelEntry, PolicyVersion
from app.db.tables.job_spec import PolicyRef
from app.errors import InvalidRequest
from app.http.validation_errors import read
from app.objects import served_adapters
from app.policies.embedders import checked_embedder
from app.policies.merge import PolicyAdded, PolicyChange, changed_fields, merge
from app.policies.schemas import Policy, PolicyOut, Serving
from app.settings import Settings
from spard.config import RowSignal

# The values of thresholds in versions stored before these existed.
_BEFORE_BOUNDS = {
    name: getattr(PolicyRef(), name)
    for name in ("confidence", "max_dressed_refusal_rise", "max_shown_asr_rise", "max_dressed_asr")
}
_REPORTED = RowSignal("report")  # the behavior of a version without a row signal
_READS_NONE = {"read": 0}  # the behavior of a version without `row_signal.read`


def current(session: Session, settings: Settings) -> PolicyOut:
    """Return the version in force; without any stored version, the deployment's settings as version 0."""
    newest = session.scalar(select(PolicyVersion).order_by(PolicyVersion.version.desc()).limit(1))
    return _policy_response(newest) if newest else _default_policy(settings)


def serving(session: Session) -> Serving:
    """Return how models answer under the version in force; the deployment's settings have no part in it."""
    newest = session.scalar(select(PolicyVersion).order_by(PolicyVersion.version.desc()).limit(1))
    return Serving.model_validate(newest.content.get("serving", {})) if newest else Serving()


def versions(session: Session, settings: Settings) -> list[PolicyOut]:
    """Return every version, newest first, ending with version 0."""
    found = session.scalars(select(PolicyVersion).order_by(PolicyVersion.version.desc()))
    return [*(_policy_response(each) for each in found), _default_policy(settings)]


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
    """Return the requested policy: the one in force with a change applied, or the change alone if `replaces`.

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
        name: getattr(Policy(), name) for name in ("agent", "embedder", "further_tuning", "serving", "transcripts")
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


def _policy_response(stored: PolicyVersion) -> PolicyOut:
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
