"""`spard mcp`: offer the service as tools of the Model Context Protocol, over standard input and output.

Tools that read and estimate are always offered; tools that write only with `--allow-writes`. Each tool is one request
to the API with the caller's key, so an agent can do no more than its key allows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from app.commands.client import connect, get
from app.commands.terminal import CommandFailed

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

P = ParamSpec("P")
Tool = Callable[..., Any]
_PAGE = 20  # rows of a list
_ABOUT = (
    "A SPARD service fine-tunes language models behind OpenAI's API and audits each one before it is released. Show "
    "the estimate and ask before you create a job. A job that failed its safety gate is a decision: report the verdict."
)


def serve_mcp(
    allow_writes: Annotated[
        bool,
        typer.Option("--allow-writes", help="Also offer tools that upload files, create jobs and cancel them."),
    ] = False,
) -> None:
    """Serve the API to agents as MCP tools that read and estimate, over standard input and output.

    Uses SPARD_BASE_URL and SPARD_API_KEY. Files are uploaded only from the folder where it was started.
    """
    try:
        from mcp.server.mcpserver import MCPServer
    except ModuleNotFoundError as error:
        missing = f"{error.name} is not installed: pip install 'spard-service[mcp]'"
        raise CommandFailed(f"`spard mcp` cannot start: {missing}") from None
    server = MCPServer("spard", instructions=_ABOUT, log_level="WARNING")
    for tool in READS:
        _add(server, tool, is_read=True)
    for tool in WRITES if allow_writes else ():
        _add(server, tool, is_read=False)
    server.run("stdio")


def list_models() -> Any:
    """List the models: base models that a job can train, and fine-tuned models, whose ids begin with `ft:`."""
    return get("models")


def list_files(limit: int = _PAGE) -> Any:
    """List the newest uploaded files with their status."""
    return get("files", limit=limit)


def check_file(file_id: str) -> Any:
    """List the problems of an uploaded file: each once, with a hint and the number of affected rows."""
    return get(f"files/{file_id}/validation")


def list_jobs(limit: int = _PAGE) -> Any:
    """List the newest fine-tuning jobs."""
    return get("fine_tuning/jobs", limit=limit)


def estimate_job(model: str, training_file: str, settings: dict[str, Any] | None = None) -> Any:
    """Estimate a job's time and tokens, with warnings; nothing is queued. `settings` are further request fields."""
    return _post("fine_tuning/jobs/estimate", (settings or {}) | {"model": model, "training_file": training_file})


def get_job(job_id: str) -> Any:
    """Show a job: its status, its error if it failed, and the name of the model that it made."""
    return get(f"fine_tuning/jobs/{job_id}")


def list_events(job_id: str, limit: int = _PAGE) -> Any:
    """List the newest events of a job: what happened, and warnings."""
    return get(f"fine_tuning/jobs/{job_id}/events", limit=limit)


def get_verdict(job_id: str) -> Any:
    """Return the result of a job's safety audit in one sentence, or why there was none."""
    return get(f"fine_tuning/jobs/{job_id}/safety/verdict")


def get_report(job_id: str) -> Any:
    """Return the whole safety report of a job; `get_verdict` is enough for most questions."""
    return get(f"fine_tuning/jobs/{job_id}/safety")


def upload_file(path: str) -> Any:
    """Upload a training file (JSON lines of chats) from the folder where this server was started."""
    here, file = Path.cwd().resolve(), Path(path).resolve()
    if not file.is_relative_to(here) or not file.is_file():
        raise CommandFailed(f"There is no file {path!r} in {here}, and only files in there are uploaded.")
    with connect() as client:
        return client.send("files", file, {"purpose": "fine-tune"})


def create_job(model: str, training_file: str, settings: dict[str, Any] | None = None) -> Any:
    """Create a fine-tuning job, which costs time and quota: show the estimate and ask first."""
    return _post("fine_tuning/jobs", (settings or {}) | {"model": model, "training_file": training_file})


def cancel_job(job_id: str) -> Any:
    """Cancel a job that has not ended; what it trained is lost."""
    return _post(f"fine_tuning/jobs/{job_id}/cancel")


READS: tuple[Tool, ...] = (
    list_models,
    list_files,
    check_file,
    list_jobs,
    estimate_job,
    get_job,
    list_events,
    get_verdict,
    get_report,
)
WRITES: tuple[Tool, ...] = (upload_file, create_job, cancel_job)


def _add(server: MCPServer, tool: Tool, *, is_read: bool) -> None:
    from mcp.types import ToolAnnotations

    server.tool(annotations=ToolAnnotations(read_only_hint=is_read))(_reporting(tool))


def _reporting(tool: Callable[P, Any]) -> Callable[P, Any]:
    """Wrap a tool so that a CommandFailed reaches the agent as a tool error with the service's message."""
    from mcp.server.mcpserver.exceptions import ToolError

    @wraps(tool)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            return tool(*args, **kwargs)
        except CommandFailed as error:
            raise ToolError(str(error)) from None

    return call


def _post(path: str, body: object = None) -> Any:
    with connect() as client:
        return client.post(path, body)
