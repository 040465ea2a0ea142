"""The dashboard's routes, one module for each subject."""

from __future__ import annotations

from app.dashboard.pages import (
    chat,
    files,
    help,
    jobs,
    new_job,
    provider,
    provider_catalog,
    provider_policies,
    provider_reviews,
    sign_in,
)

ROUTERS = (
    sign_in.router,
    new_job.router,
    jobs.router,
    files.router,
    help.router,
    chat.router,
    provider.router,
    provider.one_job,
    provider_catalog.data,
    provider_reviews.labels_router,
    provider.log_pages,
    provider_catalog.models,
    provider.project_pages,
    provider.webhook_pages,
    provider_policies.router,
    provider_reviews.waivers_router,
)  # in order: the first route that matches answers
