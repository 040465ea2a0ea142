"""The dashboard's routes, one module for each subject."""

from __future__ import annotations

from app.dashboard.pages import (
    chat,
    files,
    jobs,
    new_job,
    provider,
    provider_data,
    provider_job,
    provider_labels,
    provider_log,
    provider_models,
    provider_policies,
    provider_projects,
    provider_waivers,
    provider_webhooks,
    sign_in,
)

ROUTERS = (
    sign_in.router,
    new_job.router,
    jobs.router,
    files.router,
    chat.router,
    provider.router,
    provider_job.router,
    provider_data.router,
    provider_labels.router,
    provider_log.router,
    provider_models.router,
    provider_projects.router,
    provider_webhooks.router,
    provider_policies.router,
    provider_waivers.router,
)  # in order: the first route that matches answers
