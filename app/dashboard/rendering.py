"""Render templates to responses with a content security policy that allows only our own scripts and server.

Style sheets and scripts are named with their digest, so that browsers can cache them forever.
"""

from __future__ import annotations

import gzip
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from typing import Any

from fastapi import Request
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup, escape
from starlette.responses import HTMLResponse

from app.dashboard.viewer import Viewer
from app.errors import AppError, NotFound
from app.help import anchor, link_code, link_first, link_term, plain_text, render_markdown, term_names
from app.jobs.reports.gather import TEMPLATES, with_code
from app.jobs.reports.plots import percent
from app.jobs.reports.verdict import is_held_back, stopping_figure
from app.jobs.schemas import JobOut

_MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "jsonl": "application/jsonl",
    "svg": "image/svg+xml",
}
_ASSET_PLACES = {
    "spard.css": ("app.jobs.reports", "templates"),  # shared with the HTML report
    "dashboard.css": ("app.dashboard", "static"),
    "dashboard.js": ("app.dashboard", "static"),
    "example.jsonl": ("app.dashboard", "static"),
    "icon.svg": ("app.dashboard", "static"),
    "htmx.min.js": ("app.dashboard", "static"),
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
}
_LOADER = ChoiceLoader([PackageLoader("app.dashboard", "templates"), TEMPLATES])
# With StrictUndefined a misspelled variable is an error; by default it would render as empty text.
_TEMPLATES = Environment(loader=_LOADER, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
_UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True, slots=True)
class Asset:
    """A file that pages link to."""

    name: str  # including its digest
    media_type: str
    content: bytes
    gzipped: bytes


def _read_asset(name: str) -> Asset:
    package, folder = _ASSET_PLACES[name]
    content = (files(package) / folder / name).read_bytes()
    stem, _, ending = name.rpartition(".")
    digest = hashlib.sha256(content).hexdigest()[:16]
    return Asset(f"{stem}.{digest}.{ending}", _MEDIA_TYPES[ending], content, gzip.compress(content, mtime=0))


_ASSETS: Mapping[str, Asset] = {name: _read_asset(name) for name in _ASSET_PLACES}

_ASSETS_BY_NAME = {asset.name: asset for asset in _ASSETS.values()}


def asset_url(name: str) -> str:
    """Return the URL of a file, given its name without digest."""
    return f"/static/{_ASSETS[name].name}"


def find_asset(name: str) -> Asset:
    """Return the file with this name, digest included; raise `NotFound` if there is none."""
    try:
        return _ASSETS_BY_NAME[name]
    except KeyError:
        raise NotFound("No such file.", code="unknown_url") from None


@pass_context
def term(context: Context, name: str, words: str = "") -> Markup:
    """Return the words with a link to the meaning of a term, where the page shows it first; else without."""
    linked: set[str] = context["linked_terms"]
    if (mark := anchor(name)) in linked:
        return escape(words or name)
    linked.add(mark)
    return link_term(name, words)


@pass_context
def with_terms(context: Context, text: str, *names: str, **words: str) -> Markup:
    """Escape a text and link the terms that it has, where the page shows them first; `words` as in `term_names`."""
    return link_first(text, term_names(*names, **words), lambda name, shown: term(context, name, shown))


def page(request: Request, name: str, viewer: Viewer | None = None, *, status: int = 200, **shown: Any) -> HTMLResponse:
    """Render the template `name` with the variables `shown`; `is_part` tells it that htmx requests only a part."""
    text = _TEMPLATES.get_template(f"{name}.html.jinja").render(
        viewer=viewer, path=request.url.path, is_part="hx-request" in request.headers, linked_terms=set(), **shown
    )
    return HTMLResponse(text, status, headers=HEADERS)


def problem_page(request: Request, error: AppError, headers: Mapping[str, str] | None = None) -> HTMLResponse:
    """Render an error page with the request's id, to be quoted when asking for help."""
    viewer = getattr(request.state, "viewer", None)
    answer = page(request, "problem", viewer, status=error.status, error=error, request_id=request.state.request_id)
    answer.headers.update(headers or {})
    if error.retry_after_s:
        answer.headers["retry-after"] = str(error.retry_after_s)
    return answer


def _size(count: int) -> str:
    size, unit = float(count), 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def _ago(at: datetime | int | None) -> str:
    if at is None:
        return "-"
    seconds = time.time() - (at if isinstance(at, int) else at.timestamp())
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _magnitude(count: int) -> str:
    """Return a number of parameters as people name it: 0.4M, 7.6B."""
    size, unit = (count / 1e9, "B") if count >= 1e9 else (count / 1e6, "M")
    return f"{size:.0f}{unit}" if size >= 100 else f"{size:.1f}{unit}"


def job_name(job: JobOut) -> str:
    """Return a job's suffix and file name; the beginning of its id if it has neither."""
    return " · ".join(filter(None, (job.suffix, job.filename))) or short_id(job.id)


def short_id(job_id: str) -> str:
    """Return the first 12 characters of a job's id, which also end its model's name."""
    return job_id.removeprefix("ftjob-")[:12]


_TEMPLATES.filters |= {"job_name": job_name, "short_id": short_id, "size": _size, "ago": _ago, "duration": _duration}


_TEMPLATES.filters |= {"magnitude": _magnitude}


_TEMPLATES.filters |= {"percent": percent, "count": "{:,}".format, "with_code": with_code}


_TEMPLATES.filters |= {"is_held_back": is_held_back, "stopping_figure": stopping_figure}


def _project_name(project_id: str, names: Mapping[str, str]) -> Markup:
    """Return a project's name with its id as the title; the id alone if it has no name here."""
    # Without `Markup.format`, which takes longer than the rest of a table's row.
    if name := names.get(project_id):
        return Markup(f'<span title="{escape(project_id)}">{escape(name)}</span>')  # noqa: S704 - both are escaped
    return Markup(f"<code>{escape(project_id)}</code>")  # noqa: S704 - it is escaped


_TEMPLATES.filters |= {"project_name": _project_name}


_TEMPLATES.filters |= {"with_terms": with_terms, "plain_text": plain_text, "render_markdown": render_markdown}


_TEMPLATES.globals |= {"asset": asset_url, "term": term, "code_link": link_code}
