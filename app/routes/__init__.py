"""The HTTP endpoints, one module per resource; the domains' services do the work."""

from __future__ import annotations

from fastapi import APIRouter

from app.routes import catalog, files, health, inference, jobs, policies, projects, provider_jobs, results, webhooks

_CUSTOMER: tuple[APIRouter, ...] = (
    jobs.router,  # first: its reads are the most frequent, and routes are tried in order
    files.router,
    files.uploads_router,
    results.router,
    results.checkpoints_of_jobs,
    results.checkpoint_permissions,
    jobs.graders,
    inference.router,
    catalog.models,
    policies.waivers_of_jobs,
    provider_jobs.later_audits_of_jobs,
    webhooks.router,
    results.signing_keys,
)
_PROVIDER: tuple[APIRouter, ...] = (
    catalog.admin,
    policies.router,
    provider_jobs.fleet_router,
    provider_jobs.any_job,
    policies.held,
    policies.waivers_of_job,
    provider_jobs.later_audits_of_job,
    projects.log,
    projects.projects,
    projects.keys,
    webhooks.admin,
    projects.stored_replies,
    provider_jobs.labels,
)
WEBHOOKS = webhooks.sent
ROUTERS = (*_CUSTOMER, *_PROVIDER, health.router, health.metrics)  # the first match answers
