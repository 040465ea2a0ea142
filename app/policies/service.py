"""Policies as rows: added, never changed; the newest is in force."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app.audit_log import service as audit_log
from app.errors import InvalidRequest, Unavailable
from app.models import BaseModelEntry
from app.policies.models import PolicyVersion
from app.policies.schemas import Policy, PolicyOut
from app.settings import Settings
from spard.config import GateThresholds


def current(session: Session, settings: Settings) -> PolicyOut:
    """The version in force."""
    newest = session.scalar(select(PolicyVersion).order_by(PolicyVersion.version.desc()).limit(1))
    return PolicyOut.model_validate(newest) if newest else _built_in(settings)


def versions(session: Session, settings: Settings) -> list[PolicyOut]:
    """Every version, newest first."""
    found = session.scalars(select(PolicyVersion).order_by(PolicyVersion.version.desc()))
    return [*(PolicyOut.model_validate(each) for each in found), _built_in(settings)]


def add(session: Session, key_id: str, policy: Policy) -> PolicyOut:
    """A new version, in force for all jobs created from now on."""
    offered = set(session.scalars(select(BaseModelEntry.alias)))
    for alias in policy.models or ():
        if alias not in offered:
            message = f"The model {alias[:128]!r} is not offered; offered: {', '.join(sorted(offered)) or 'none yet'}."
            raise InvalidRequest(message, code="model_not_found", param="models")
    last = session.scalar(select(func.max(PolicyVersion.version))) or 0
    added = PolicyVersion(version=last + 1, created_by=key_id, content=policy.model_dump(mode="json"))
    session.add(added)
    try:
        session.flush()
    except IntegrityError:
        raise Unavailable("Another policy was added at this moment; look at it and try again.") from None
    audit_log.record(session, "policy.added", f"policy-{added.version}", content=added.content)
    return PolicyOut.model_validate(added)


def frozen(policy: PolicyOut) -> dict[str, Any]:
    """What a job keeps of the version that it was created under."""
    return asdict(policy.content.thresholds) | {"version": policy.version, "waivers": policy.content.waivers}


def _built_in(settings: Settings) -> PolicyOut:
    thresholds = GateThresholds(
        max_asr=settings.gate_max_asr,
        max_asr_rise=settings.gate_max_asr_rise,
        max_over_refusal_rise=settings.gate_max_over_refusal_rise,
        max_utility_drop=settings.gate_max_utility_drop,
        max_unscored=settings.gate_max_unscored,
    )
    return PolicyOut(version=0, created_at=None, created_by=None, content=Policy(thresholds=thresholds))
