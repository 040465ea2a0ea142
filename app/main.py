"""The HTTP service: routes put together, and every error in OpenAI's envelope."""

from __future__ import annotations

import gc
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from threading import Event, Thread

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.responses import Response

from app import db, health, logs, metrics, misses, openapi, preflight, traces
from app.audit_log.router import router as audit_log
from app.bodies import Bodies
from app.catalog.router import admin, models
from app.checkpoints.router import of_jobs, permissions
from app.envelope import Envelope, problem
from app.errors import AppError, InvalidRequest, NotFound, TooLarge, Unavailable
from app.files.router import router as files
from app.graders import router as graders
from app.guesses import Guesses
from app.invalid import first_fault
from app.jobs.router import router as jobs
from app.keys import service as keys
from app.keys.router import router as api_keys
from app.policies.router import router as policies
from app.queue import Dispatcher
from app.quotas.router import router as projects
from app.rates import Rates
from app.retention import Sweeper
from app.settings import Settings, get_settings
from app.storage import open_storage
from app.uploads.router import router as uploads
from app.waivers import router as waivers
from app.webhooks.courier import Courier
from app.webhooks.router import router as webhooks

log = logging.getLogger(__name__)


def create_app(settings: Settings | None = None) -> FastAPI:
    """The application on the database and storage of `settings`; the schema must be current."""
    settings = settings or get_settings()
    words = "Fine-tuning with a safety defence, in OpenAI's words."
    app = FastAPI(title="SPARD", description=words, responses=openapi.ERRORS, lifespan=_running)
    app.openapi = partial(openapi.document, app)  # type: ignore[method-assign]  # FastAPI's own way to change it
    app.state.settings = settings
    app.state.engine = db.make_engine(settings.database())
    app.state.storage = open_storage(settings.storage(), settings.s3_endpoint_url)
    app.state.requests, app.state.rates, app.state.guesses = metrics.Requests(), Rates(), Guesses()
    app.state.bodies, app.state.misses = Bodies(), Rates()
    of_customers = (files, uploads, jobs, of_jobs, permissions, graders, models, waivers.of_jobs, webhooks)
    of_the_provider = (admin, policies, waivers.admin, audit_log, projects, api_keys)
    for router in (*of_customers, *of_the_provider, health.router, metrics.router):
        app.include_router(router)
    app.add_middleware(Envelope)
    for kind in (AppError, RequestValidationError, HTTPException, OperationalError, PoolTimeout):
        app.add_exception_handler(kind, _answer)
    return app


def checked_app() -> FastAPI:
    """What `uvicorn app.main:checked_app --factory` serves; what is missing is one line and exit code 1."""
    settings = get_settings()
    logs.set_up(settings.log_format)
    try:
        traces.set_up("spard-api")
        preflight.check(settings)
    except preflight.Unfit as error:
        raise SystemExit(f"spard: {error}") from None
    return served_app(settings)


def served_app(settings: Settings) -> FastAPI:
    """The application of a process that does nothing else: what it made to start is for good.

    A collection that walks all of it again stops every request for 0.2 s, a few times a minute.
    """
    app = create_app(settings)
    gc.collect()
    gc.freeze()
    return app


@asynccontextmanager
async def _running(app: FastAPI) -> AsyncIterator[None]:
    settings: Settings = app.state.settings
    if settings.admin_key:
        with db.transaction(app.state.engine) as session:
            keys.ensure_first(session, settings.admin_key.get_secret_value())
    broker_url = settings.broker_url.get_secret_value() if settings.broker_url else None
    stop = Event()
    courier = Courier(app.state.engine, allow_local=settings.webhooks_to_loopback)
    threads = [
        Thread(target=Dispatcher(app.state.engine, broker_url).run, args=(stop,), name="outbox"),
        Thread(target=courier.run, args=(stop,), name="webhooks"),
        Thread(target=Sweeper(app.state.engine, app.state.storage).run, args=(stop,), name="sweeper"),
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        app.state.engine.dispose()


async def _answer(request: Request, exc: Exception) -> Response:
    headers = exc.headers if isinstance(exc, HTTPException) else None
    answer = problem(request.scope, _error(request, exc), headers)
    if isinstance(exc, NotFound):
        answer.background = misses.noted(request, exc)
    return answer


def _error(request: Request, exc: Exception) -> AppError:
    """What went wrong, in our words."""
    where = f"{request.method} {request.url.path}"
    match exc:
        case AppError():
            return exc
        case RequestValidationError():
            return first_fault(exc)
        case HTTPException(status_code=404):
            return NotFound(f"Unknown URL ({where}).", code="unknown_url")
        case HTTPException(status_code=405):
            return InvalidRequest(f"Not allowed: {where}.", code="method_not_allowed", status=405)
        case HTTPException(status_code=413):
            return TooLarge(exc.detail)
        case HTTPException():
            return InvalidRequest(exc.detail, status=exc.status_code)
        case _:
            log.warning("%s: the database does not answer: %s", where, type(exc).__name__)
            return Unavailable("The database does not answer at the moment; try again.")
