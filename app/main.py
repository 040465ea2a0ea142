"""Assemble the HTTP service: routes, background threads, and errors in OpenAI's envelope.

Clients of OpenAI's API request more than fine-tuning, so an unknown URL is answered with a hint.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from threading import Event, Thread

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from app import callers, db, keys, retention
from app.dashboard.pages import ROUTERS as PAGES
from app.dashboard.rendering import problem_page
from app.dashboard.viewer import sign_in_redirect
from app.errors import (
    AppError,
    Conflict,
    InvalidRequest,
    NotFound,
    TooLarge,
    TooManyRequests,
    Unavailable,
    Unfit,
    UnsupportedMedia,
)
from app.files.counting import Counters
from app.http import bodies, openapi
from app.http.connections import raise_limit
from app.http.lanes import CommonThreads, Lanes, Slots
from app.http.middleware import Envelope, problem
from app.http.rate_limit import KeyThrottle, RateLimits
from app.http.validation_errors import first_fault
from app.inference import call_leases
from app.inference.call_leases import ledger_folder
from app.inference.service import InferenceService, server_watch
from app.inference.vllm import unload_withdrawn
from app.jobs import later_audits, lease
from app.jobs.stream import Streams
from app.ops import lifecycle, logs, metrics, preflight, tracing
from app.ops.broker import Dispatcher
from app.ops.lifecycle import when_told_to_stop
from app.ops.readiness import Readiness, Saturation
from app.routes import ROUTERS, WEBHOOKS
from app.settings import Settings, get_settings
from app.storage import QUICK, StorageFull, open_storage
from app.webhooks.delivery import Courier
from spard.release.version import package_version

log = logging.getLogger(__name__)
_OF_DATABASE = (DataError, IntegrityError, OperationalError, PoolTimeout)
_LOCKED_RETRY_S = 5
_JOIN_S = 3.0  # seconds that background threads have to end
_ROUTES = openapi.share_routes(openapi.reference_pages, *ROUTERS, *PAGES)
_ANSWERING = ("chat/completions", "completions", "responses", "moderations")
_ELSEWHERE = ("embeddings", "batches", "evals", "images", "audio", "assistants", "threads")
_AZURE = ("/openai/", "/deployments/", "/v1/deployments/")  # the last two with a base_url
_DOMAINS = ("files", "uploads", "fine_tuning", "models", "admin", "webhook_endpoints", *_ANSWERING, *_ELSEWHERE)


def create_app(settings: Settings | None = None) -> FastAPI:
    """Return the application for the database and storage of `settings`; the schema must be current."""
    settings = settings or get_settings()
    words = "Fine-tuning with a safety defense, in OpenAI's words."
    app = FastAPI(
        title="SPARD",
        version=package_version("spard-service"),
        description=words,
        routes=list(_ROUTES),
        webhooks=WEBHOOKS,
        lifespan=_running,
        docs_url=None,
        redoc_url=None,
    )
    openapi.mount_files(app)
    app.openapi = partial(openapi.document, app)  # type: ignore[method-assign]  # FastAPI's documented way to replace it
    app.state.settings = settings
    app.state.engine = db.make_engine(settings.database())
    places = settings.storage(), settings.s3_endpoint_url, settings.s3_public_endpoint_url
    # Two clients of one storage: reads while a client waits give up early, writes are patient.
    app.state.storage, app.state.quick_storage = open_storage(*places), open_storage(*places, QUICK)
    app.state.requests, app.state.lanes = metrics.RequestMetrics(), Lanes(settings)
    app.state.common_threads = CommonThreads(settings.requests_at_once, keys.COOKIE)
    app.state.counters = Counters(settings.counting_processes)
    app.state.saturation = Saturation(app.state.lanes)
    app.state.readiness = Readiness(settings, app.state.engine, app.state.quick_storage, app.state.saturation)
    app.state.uploads = Slots("uploads", "too_many_uploads")
    app.state.streams, app.state.stream_slots = Streams(app.state.engine), Slots("streams", "too_many_streams")
    limits = RateLimits(settings.broker_url.get_secret_value() if settings.broker_url else None)
    app.state.rate_limits, app.state.key_throttle = limits, KeyThrottle(limits)
    app.state.serving = InferenceService(settings, app.state.engine, app.state.storage, limits)
    app.state.server_watch = server_watch(settings, app.state.engine, app.state.serving.clients)
    app.state.worker = None  # the supervisor of the embedded mode's worker, if there is one
    app.add_middleware(Envelope)
    for kind in (AppError, RequestValidationError, HTTPException, *_OF_DATABASE):
        app.add_exception_handler(kind, _answer)
    return app


def checked_app() -> FastAPI:
    """Return the application for `uvicorn app.main:checked_app --factory`, or exit with one line about the fault."""
    try:
        settings = get_settings()
        logs.set_up(settings.log_format)
        tracing.set_up("spard-api")
        preflight.check(settings)
    except Unfit as error:
        raise SystemExit(f"spard: {error}") from None
    return served_app(settings)


def served_app(settings: Settings) -> FastAPI:
    """Return the application for a process that only serves it, with its routes built in advance."""
    raise_limit()
    app = create_app(settings)
    openapi.build_routes(_ROUTES)
    lifecycle.spare_requests()
    return app


@asynccontextmanager
async def _running(app: FastAPI) -> AsyncIterator[None]:
    settings: Settings = app.state.settings
    if settings.admin_key:
        with db.transaction(app.state.engine) as session:
            keys.ensure_first(session, settings.admin_key.get_secret_value())
    stop = Event()
    threads = _background_threads(app, settings, stop)
    loop, streams = asyncio.get_running_loop(), app.state.streams
    watches = [
        loop.create_task(app.state.saturation.watch()),
        loop.create_task(unload_withdrawn(lambda: app.state.serving.engines.unload_withdrawn())),
    ]
    if app.state.server_watch is not None:
        watches.append(loop.create_task(app.state.server_watch.run()))
    when_told_to_stop(lambda: loop.call_soon_threadsafe(lambda: loop.create_task(streams.close())))
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for watch in watches:
            watch.cancel()
        end = time.monotonic() + _JOIN_S
        for thread in threads:  # one may be blocked by the storage; its work can be interrupted at any point
            thread.join(max(0.0, end - time.monotonic()))
        app.state.counters.close()
        await app.state.serving.close()
        app.state.engine.dispose()


def _background_threads(app: FastAPI, settings: Settings, stop: Event) -> list[Thread]:
    """Return the threads that run beside the requests until `stop` is set, not started yet."""
    broker_url = settings.broker_url.get_secret_value() if settings.broker_url else None
    courier = Courier(app.state.engine, allow_local=settings.webhooks_to_loopback)
    sweeper = retention.RetentionLoop(app.state.engine, app.state.storage, timedelta(seconds=settings.objects_check_s))
    return [
        Thread(target=Dispatcher(app.state.engine, broker_url).run, args=(stop,), name="outbox", daemon=True),
        Thread(target=courier.run, args=(stop,), name="webhooks", daemon=True),
        Thread(target=sweeper.run, args=(stop,), name="retention", daemon=True),
        Thread(target=lease.run_reaper, args=(app.state.engine, stop, settings.reap_s), name="reaper", daemon=True),
        Thread(
            target=call_leases.run,
            args=(app.state.engine, ledger_folder(settings), stop, settings.reap_s),
            name="lost calls",
            daemon=True,
        ),
        Thread(target=lifecycle.collect_garbage, args=(stop,), name="garbage", daemon=True),
        Thread(target=later_audits.run, args=(app.state.engine, settings, stop), name="later audits", daemon=True),
    ]


async def _answer(request: Request, exc: Exception) -> Response:
    headers = exc.headers if isinstance(exc, HTTPException) else None
    # A browser that needs to sign in is sent to the sign-in page instead of an error.
    if needed := sign_in_redirect(request, exc):
        return RedirectResponse(needed.location, 303)
    is_page = not request.url.path.startswith("/v1") and "text/html" in request.headers.get("accept", "")
    answer = (
        problem_page(request, _error(request, exc), headers)
        if is_page
        else problem(request.scope, _error(request, exc), headers)
    )
    if isinstance(exc, NotFound):
        # After the response, so that its time does not tell unknown ids from those of other projects.
        answer.background = callers.probe_task(request, exc)
    return answer


def _error(request: Request, exc: Exception) -> AppError:
    """Return the error to send to the client for an exception."""
    where = f"{request.method} {request.url.path}"
    match exc:
        case AppError():
            return exc
        case HTTPException(__cause__=AppError() as cause):  # raised while FastAPI reads the body
            return cause
        case RequestValidationError() | HTTPException(status_code=400) if bodies.are_compressed(request.headers):
            return UnsupportedMedia("Send the body uncompressed.", code="unsupported_encoding")
        case RequestValidationError():
            return first_fault(exc)
        case HTTPException(status_code=404):
            return NotFound(f"Unknown URL ({where}).{_url_hint(request.url.path)}", code="unknown_url")
        case HTTPException(status_code=405):
            return InvalidRequest(f"Not allowed: {where}.", code="method_not_allowed", status=405)
        case HTTPException(status_code=413):
            return TooLarge(exc.detail)
        case HTTPException() if isinstance(exc.__cause__, UnicodeDecodeError | RecursionError):
            why = "it is not UTF-8" if isinstance(exc.__cause__, UnicodeDecodeError) else "it is nested too deeply"
            return InvalidRequest(f"The body is no JSON that can be read: {why}.", code="invalid_json")
        case HTTPException():
            return InvalidRequest(exc.detail, status=exc.status_code)
        case _:
            return _database_error(where, exc)


def _database_error(where: str, exc: Exception) -> AppError:
    """Return the error for a database exception; raise it again if it is our bug."""
    match exc:
        case DBAPIError() if db.is_conflict(exc):
            log.warning("%s: another request changed the same rows: %s", where, exc.orig)
            return Conflict("Another request changed the same thing at this moment; try again.")
        case DBAPIError() if db.is_lock_timeout(exc):
            log.warning("%s: other requests hold the same rows: %s", where, db.why(exc))
            message = "Other requests work on the same rows of this project; send fewer at once, and try again."
            error = TooManyRequests(message, code="too_many_at_once")
            error.retry_after_s = _LOCKED_RETRY_S
            return error
        case DataError() if db.holds_nul(exc):
            return InvalidRequest("A text of the request holds the NUL character; remove it.", code="nul_character")
        case DataError() | IntegrityError():
            raise exc  # our bug
        case _ if db.is_full(exc):
            log.warning("%s: the database's disk is full: %s", where, db.why(exc))
            return StorageFull("The service's disk is full, and nothing of this request was kept; try again later.")
        case _:
            log.warning("%s: the database does not answer: %s", where, db.why(exc))
            return Unavailable("The database does not answer at the moment; try again.")


def _url_hint(path: str) -> str:
    """Return a hint as a sentence with a leading space, or an empty text."""
    if path.startswith(_AZURE):
        return " Azure's paths are not served; take OpenAI(base_url=...) that ends with /v1 in place of AzureOpenAI."
    under = path.removeprefix("/v1/")
    if under == path:
        is_known = path.lstrip("/").startswith(_DOMAINS)
        return " Paths begin with /v1: let the client's base_url end with it." if is_known else ""
    if under.startswith(_ELSEWHERE):
        return f" Not served here; models answer at {', '.join(_ANSWERING[:3])}."
    return ""
