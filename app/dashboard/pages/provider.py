"""What the provider has and has decided, on one page."""

from __future__ import annotations

from fastapi import APIRouter, Request
from sqlalchemy import func, select
from starlette.responses import Response

from app.audit_log import service as audit_log
from app.catalog import service as catalog
from app.dashboard.rendering import page
from app.dashboard.viewer import ProviderDep
from app.db.tables import TERMINAL, Job
from app.deps import ReadDep, SettingsDep
from app.keys import admin as keys
from app.policies import service as policies

router = APIRouter(include_in_schema=False)

_ENTRIES = 50


@router.get("/provider")
def provider_page(request: Request, viewer: ProviderDep, session: ReadDep, settings: SettingsDep) -> Response:
    """Show the queue, the catalog, the policy in force, keys and the latest of the audit log."""
    waiting = select(Job.project_id, Job.status, func.count()).where(Job.status.not_in(TERMINAL))
    rows = session.execute(waiting.group_by(Job.project_id, Job.status).order_by(Job.project_id)).all()
    return page(
        request,
        "provider",
        viewer,
        queue=[tuple(row) for row in rows],
        models=catalog.base_models(session),
        pools=catalog.pools(session),
        suites=catalog.suites(session),
        policy=policies.current(session, settings),
        keys=keys.list_keys(session, None),
        entries=audit_log.entries(session, None, None, _ENTRIES).data,
    )
