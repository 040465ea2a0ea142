"""What a model is marked with where people look: a server that proves nothing, and an earlier kind of audit."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy.orm import Session

from app.catalog.schemas import ModelOut
from app.policies import service as policies
from app.policies.schemas import Serving
from spard.release.version import AUDIT_VERSION


def attested(model: ModelOut, serving: Serving) -> ModelOut:
    """Return a model, marked if a server answers for it that cannot prove what it has loaded."""
    is_named = any(each.model == model.id for each in serving.unattested)
    return model.model_copy(update={"attested": False}) if is_named else model


def older_audit(safety: Mapping[str, object] | None) -> int | None:
    """Return the version of the audit behind a job's or a checkpoint's numbers if it is an earlier one, else None.

    The first version did not say which it was.
    """
    version = (safety or {}).get("audit_version", 1)
    return version if isinstance(version, int) and version < AUDIT_VERSION else None


def is_withheld(session: Session, safety: Mapping[str, object] | None) -> bool:
    """Tell whether the policy in force withholds what this audit has released, for its version."""
    return older_audit(safety) is not None and policies.serving(session).older_audits == "withhold"
