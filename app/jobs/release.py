"""Who may have an adapter: what passed no gate leaves the house under a waiver, or to the provider alone."""

from __future__ import annotations

from app.errors import Forbidden
from app.keys.service import Principal
from app.models import Job, utc_now


def check(caller: Principal, job: Job) -> None:
    """What did not pass leaves under a waiver in force, or to the provider whose measurement it is."""
    safety = job.safety or {}
    if waiver := safety.get("waiver"):
        if waiver["expires_at"] <= utc_now().timestamp():
            raise Forbidden(f"The waiver that released the adapter of {job.id} has expired.", code="waiver_expired")
    elif safety.get("gate", {}).get("decision") != "pass" and "admin" not in caller.scopes:
        raise Forbidden("This adapter was released to the provider only.", code="not_published")
