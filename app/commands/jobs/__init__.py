"""`spard jobs`: create and watch fine-tuning jobs, show their audits, and download their adapters."""

from __future__ import annotations

import typer

from app.commands.jobs import results, running, start, watch

jobs = typer.Typer(no_args_is_help=True, help="Start, watch and compare fine-tuning jobs, and download their results.")

jobs.command("create")(start.create_job)
jobs.command("estimate")(start.estimate_job)
jobs.command("list")(running.list_jobs)
jobs.command("show")(running.show_job)
jobs.command("watch")(watch.watch_job)
jobs.command("follow", hidden=True)(watch.watch_job)  # an older name
jobs.command("events")(running.show_events)
jobs.command("metrics")(running.show_metrics)
jobs.command("pause")(running.pause_job)
jobs.command("resume")(running.resume_job)
jobs.command("cancel")(running.cancel_job)
jobs.command("delete")(running.delete_job)
jobs.command("report")(results.show_report)
jobs.command("safety")(results.show_safety)
jobs.command("risky-rows")(results.list_risky_rows)
jobs.command("task-replies")(results.list_task_replies)
jobs.command("compare")(results.compare_jobs)
jobs.command("adapter")(results.fetch_adapter)
jobs.command("checkpoints")(results.list_checkpoints)
jobs.command("checkpoint")(results.fetch_checkpoint)
