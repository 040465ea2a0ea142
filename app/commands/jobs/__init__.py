"""`spard jobs`: create and watch fine-tuning jobs, show their audits, and download their adapters."""

from __future__ import annotations

import typer

from app.commands.jobs import manage, start, watch

jobs = typer.Typer(no_args_is_help=True, help="Start, watch and compare fine-tuning jobs, and download their results.")

jobs.command("create")(start.create_job)
jobs.command("estimate")(start.estimate_job)
jobs.command("list")(manage.list_jobs)
jobs.command("show")(manage.show_job)
jobs.command("watch")(watch.watch_job)
jobs.command("follow", hidden=True)(watch.watch_job)  # an older name
jobs.command("events")(manage.show_events)
jobs.command("metrics")(manage.show_metrics)
jobs.command("pause")(manage.pause_job)
jobs.command("resume")(manage.resume_job)
jobs.command("cancel")(manage.cancel_job)
jobs.command("delete")(manage.delete_job)
jobs.command("report")(manage.show_report)
jobs.command("safety")(manage.show_safety)
jobs.command("risky-rows")(manage.list_risky_rows)
jobs.command("task-replies")(manage.list_task_replies)
jobs.command("compare")(manage.compare_jobs)
jobs.command("adapter")(manage.fetch_adapter)
jobs.command("checkpoints")(manage.list_checkpoints)
jobs.command("checkpoint")(manage.fetch_checkpoint)
