"""The HTTP endpoints, one module per domain; the domains' services do the work."""

from __future__ import annotations

from fastapi import APIRouter

from app.routes import (
    any_job,
    audit_log,
    catalog,
    checkpoints,
    files,
    fleet,
    graders,
    health,
    inference,
    jobs,
    keys,
    later_audits,
    metrics,
    policies,
    quotas,
    reply_labels,
    results,
    signing_keys,
    stored_replies,
    uploads,
    waivers,
    webhooks,
)

_CUSTOMER: tuple[APIRouter, ...] = (
    jobs.router,  # first: its reads are the most frequent, and routes are tried in order
    files.router,
    uploads.router,
    results.router,
    checkpoints.of_jobs,
    checkpoints.permissions,
    graders.router,
    inference.router,
    catalog.models,
    waivers.of_jobs,
    later_audits.of_jobs,
    webhooks.router,
    signing_keys.router,
)
_PROVIDER: tuple[APIRouter, ...] = (
    catalog.admin,
    policies.router,
    fleet.router,
    any_job.router,
    waivers.held,
    waivers.admin,
    later_audits.admin,
    audit_log.router,
    quotas.router,
    keys.router,
    webhooks.admin,
    stored_replies.router,
    reply_labels.router,
)
WEBHOOKS = webhooks.sent
ROUTERS = (*_CUSTOMER, *_PROVIDER, health.router, metrics.router)  # the first match answers
