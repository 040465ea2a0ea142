"""The pages, one module for each subject."""

from __future__ import annotations

from app.dashboard.pages import chat, files, jobs, new_job, provider, sign_in, transcripts

ROUTERS = (
    sign_in.router,
    new_job.router,
    jobs.router,
    transcripts.router,
    files.router,
    chat.router,
    provider.router,
)  # the first that matches answers
