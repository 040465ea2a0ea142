"""`spard projects` and `spard quotas`: manage projects, their usage and their limits."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from app.commands.client import connect, get
from app.commands.terminal import Json, show_record, show_rows

projects = typer.Typer(no_args_is_help=True, help="Manage projects; all keys of a project share its files and jobs.")
quotas = typer.Typer(no_args_is_help=True, help="Manage the limits of projects.")

ProjectId = Annotated[str, typer.Argument(help="The project's id, see `spard projects list`.")]
_USAGE = ("project_id", "jobs", "gpu_seconds", "trained_tokens", "calls", "file_bytes", "file_rows", "pending_bytes")


@projects.command("list")
def list_projects(as_json: Json = False) -> None:
    """List all projects, oldest first."""
    show_rows(get("admin/projects")["data"], ("id", "name", "created_at"), as_json)


@projects.command("create")
def create_project(
    name: Annotated[str, typer.Argument(help="The project's display name.")], as_json: Json = False
) -> None:
    """Create a project, without limits and without a key; `spard keys create ID NAME` creates its key."""
    with connect() as client:
        made = client.post("admin/projects", {"name": name})
    show_record(made, as_json)


@projects.command("show")
def show_project(project_id: ProjectId, as_json: Json = False) -> None:
    """Show one project with its limits."""
    show_record(get(f"admin/projects/{project_id}"), as_json)


@projects.command("usage")
def show_usage(
    since: Annotated[int | None, typer.Option(min=0, help="Only jobs created since then, in Unix seconds.")] = None,
    until: Annotated[int | None, typer.Option(min=0, help="Only jobs created before then, in Unix seconds.")] = None,
    as_json: Json = False,
) -> None:
    """Show how much each project has used, and how much it stores now."""
    show_rows(get("admin/usage", start_time=since, end_time=until)["data"], _USAGE, as_json)


@quotas.command("list")
def list_quotas(as_json: Json = False) -> None:
    """List the limits of all projects; an empty cell means no limit."""
    found = get("admin/projects")["data"]
    rows = [{"project": each["id"]} | each["quota"] for each in found]
    show_rows(rows, [*dict.fromkeys(name for row in rows for name in row)], as_json)


@quotas.command("show")
def show_quota(project_id: ProjectId, as_json: Json = False) -> None:
    """Show the limits of one project; a missing field means no limit."""
    show_record(get(f"admin/projects/{project_id}")["quota"], as_json)


@quotas.command("set")
def set_quota(
    project_id: ProjectId,
    max_file_bytes: Annotated[int | None, typer.Option(min=0, help="Total bytes of its files.")] = None,
    max_file_rows: Annotated[int | None, typer.Option(min=0, help="Total rows of its files.")] = None,
    max_jobs_per_day: Annotated[int | None, typer.Option(min=0, help="Jobs created in 24 hours.")] = None,
    max_unfinished_jobs: Annotated[
        int | None, typer.Option(min=0, help="Jobs that are queued or running at one time.")
    ] = None,
    max_gpu_seconds: Annotated[float | None, typer.Option(min=0, help="GPU seconds of its jobs in 30 days.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=0, help="API requests per minute.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=0, help="Tokens of prompts and replies per minute.")
    ] = None,
    max_tokens_per_day: Annotated[
        int | None, typer.Option(min=0, help="Tokens of prompts and replies in 24 hours.")
    ] = None,
    weight: Annotated[
        float | None, typer.Option(min=0.01, help="Weight of the project's share of the GPUs; default: 1.")
    ] = None,
    lifted: Annotated[list[str] | None, typer.Option("--lift", help="Name of a limit to remove.")] = None,
    as_json: Json = False,
) -> None:
    """Change limits of a project; limits that are not named stay."""
    given: dict[str, Any] = {
        "max_file_bytes": max_file_bytes,
        "max_file_rows": max_file_rows,
        "max_jobs_per_day": max_jobs_per_day,
        "max_unfinished_jobs": max_unfinished_jobs,
        "max_gpu_seconds": max_gpu_seconds,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_tokens_per_day": max_tokens_per_day,
        "weight": weight,
    }
    free = [name.replace("-", "_") for name in lifted or ()]
    if unknown := set(free) - given.keys():
        raise typer.BadParameter(f"{unknown.pop()} is none of {', '.join(given)}", param_hint="--lift")
    changed = {name: value for name, value in given.items() if value is not None} | dict.fromkeys(free)
    if not changed:
        raise typer.BadParameter("Name a limit to set, or one to --lift.")
    with connect() as client:
        # The POST replaces the whole quota, so the limits that are not named are sent along.
        quota = client.get(f"admin/projects/{project_id}")["quota"]
        project = client.post(f"admin/projects/{project_id}/quota", quota | changed)
    show_record(project["quota"], as_json)
