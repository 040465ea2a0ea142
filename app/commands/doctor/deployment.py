"""Checks of a deployment: keys, judge, models, pools, suites, workers, wake-ups and the vLLM server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import timedelta
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from app import db, keys, signing
from app.catalog import service as catalog
from app.catalog.checklist import Point, corpus_points, model_points
from app.catalog.fitness import matches_judge, require_fit
from app.commands.doctor import Finding, machine, note, ok, problem
from app.db.tables import ApiKey, BaseModelEntry, Job, JobStatus, Outbox
from app.errors import AppError, Unfit
from app.inference.clients import Clients
from app.inference.service import server_watch
from app.jobs import fleet
from app.jobs.fleet import WorkerOut
from app.ops.preflight import AT_OPENAI, check_judge, is_at_openai
from app.policies import service as policies
from app.settings import Settings
from spard.config import JudgeSpec
from spard.errors import InvalidKey, NotProved
from spard.release.keys import MAKE, OWN_KEY
from spard.release.manifest import key_id

if TYPE_CHECKING:
    from app.inference.vllm_server import ServerReport

_LATE = timedelta(minutes=2)
_WAIT_S = 5.0


def checks(settings: Settings) -> Iterator[Finding]:
    """Run the checks that need no database, then the checks of the database."""
    if settings.is_embedded() and not settings.data_dir.is_dir():
        return  # there is no deployment
    yield signing_key(settings)
    yield from judge(settings)
    engine = machine.checked_engine(settings)
    if engine is None:
        return
    try:
        with db.read(engine) as session:
            yield admin_key(session)
            yield from models(session, settings)
            yield from corpora(session)
            yield from work(session, settings)
        yield from serving(settings, engine)
    finally:
        engine.dispose()


def signing_key(settings: Settings) -> Finding:
    """Check the key that adapters are signed with, without creating one."""
    path = settings.signing_key or settings.data_dir / OWN_KEY
    if not path.is_file():
        made = (
            "`spard up` makes one" if settings.is_embedded() and settings.signing_key is None else f"make one: {MAKE}"
        )
        return problem("signing key", f"There is none at {path}.", f"{made}; else set SPARD_SIGNING_KEY to its place")
    try:
        known = signing.public_keys(settings)
        known.require(key_id(signing.signing_key(settings).public_key()))
    except (Unfit, InvalidKey, NotProved) as error:
        if "revoked" in error.message:
            cure = "make another key and set SPARD_SIGNING_KEY to it"
        elif "chmod" in error.message:
            cure = f"chmod 600 {path}"
        else:
            cure = f"let the service's user read it (chmod 600, chown), or make another: {MAKE}"
        return problem("signing key", error.message, cure)
    return ok("signing key", f"{known.current} at {path}")


def judge(settings: Settings) -> Iterator[Finding]:
    """Check the judge's settings, its endpoint, and the record of its measured errors."""
    spec = settings.judge
    try:
        check_judge(spec, settings.judge_key)
    except Unfit as error:
        yield problem("judge", error.message, "set what is named, or take another judge with SPARD_JUDGE")
        return
    for each in spec.with_members():
        if each.name == "llm" and each.base_url and (fault := _unreachable(each.base_url)):
            cure = "start the judge's server, or correct SPARD_JUDGE_BASE_URL; jobs wait for it meanwhile"
            yield problem("judge", f"Nothing answers at {each.base_url}: {fault}.", cure)
            return
    yield note("judge", AT_OPENAI) if is_at_openai(spec) else ok("judge", f"{spec.name} can be asked")
    if settings.judge_errors is not None:
        yield _check_judge_record(settings.judge_errors, spec)


def _unreachable(url: str) -> str | None:
    try:
        with urlopen(Request(url, method="HEAD"), timeout=_WAIT_S):  # noqa: S310 - the provider's own address
            return None
    except HTTPError:
        return None  # any answer means that a server is there
    except (OSError, HTTPException, ValueError) as error:
        return str(getattr(error, "reason", error))


def _check_judge_record(path: Path, spec: JudgeSpec) -> Finding:
    """Check the record that `spard judge --json` has written; the reader that jobs use is avoided: it loads torch."""
    name = spec.name
    again = f"measure it: spard judge --json > {path}"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        languages = {str(each["language"]): bool(each["may_decide"]) for each in record["languages"]}
        of, gamed = record["judge"], record.get("gamed")
    except (OSError, ValueError, KeyError, TypeError):
        return problem("judge's errors", f"SPARD_JUDGE_ERRORS: {path} cannot be read.", again)
    if not matches_judge(str(of), spec):
        return problem("judge's errors", f"{path} is of the judge {of}, and SPARD_JUDGE is {name}.", again)
    may = sorted(language for language, may_decide in languages.items() if may_decide)
    if gamed is not None and not gamed.get("n"):
        text = f"The judge {name} scored none of the judge-gaming openings, which proves nothing."
        return problem("judge's errors", text, f"see that it answers, and {again}")
    if not may or gamed is None or gamed.get("hits"):
        other = f"take another judge with SPARD_JUDGE, or {again}"
        return problem("judge's errors", f"The judge {name} errs too often to decide.", other)
    return ok("judge's errors", f"few enough in {', '.join(may)}; suites in other languages stay undecided")


def admin_key(session: Session) -> Finding:
    """Check that there is a valid key with the admin scope."""
    now = db.clock(session)
    found = [each for each in session.scalars(select(ApiKey)) if "admin" in each.scopes and keys.is_good(each, now)]
    if not found:
        return problem("admin key", "There is no valid key with the admin scope.", "make one with `spard keys first`")
    return ok("admin key", f"{len(found)} good ones")


def models(session: Session, settings: Settings) -> Iterator[Finding]:
    """Check that each offered base model is complete, and report the checklist's points on the complete ones."""
    offered = catalog.base_models(session)
    if not offered:
        yield problem("models", "No base model is offered.", "spard models add NAME FOLDER_OR_HUB_ID")
    limits = policies.current(session, settings).content.thresholds
    for entry in offered:
        if fault := _model_fault(entry):
            cure = f"put it back, or offer another: spard models add {entry.alias} FOLDER_OR_HUB_ID"
            yield problem("models", f"{entry.alias}: {fault}", cure)
        else:
            yield ok("models", f"{entry.alias} is whole")
            yield from map(_finding, model_points(session, entry, settings, limits))


def _model_fault(entry: BaseModelEntry) -> str | None:
    source = Path(entry.source)
    if source.is_absolute() and not source.is_dir():
        return f"there is no folder {source} on this machine."
    try:
        require_fit(entry.source, entry.template_arguments)
    except AppError as error:
        return error.message
    return None


def corpora(session: Session) -> Iterator[Finding]:
    """Report the checklist's points on the safety pool, which defenses need, and on the suites, which audits need."""
    yield from map(_finding, corpus_points(session))


def _finding(point: Point) -> Finding:
    if point.state == "problem":
        return problem(point.name, point.text, point.cure)
    return note(point.name, f"{point.text} {point.cure}") if point.state == "note" else ok(point.name, point.text)


def work(session: Session, settings: Settings) -> Iterator[Finding]:
    """Check for troubled workers, jobs that wait or have lost their worker, and wake-ups that are not sent."""
    now = db.clock(session)  # this machine's clock may be wrong; leases end by the database's
    late = select(Job).where(Job.status == JobStatus.queued, Job.created_at < now - _LATE)
    waiting = session.scalar(select(func.count()).select_from(late.subquery())) or 0
    running = session.scalars(select(Job.lease_expires_at).where(Job.status == JobStatus.running)).all()
    held = sum(1 for each in running if each is not None and each > now.timestamp())
    there = [each for each in fleet.workers(session) if each.is_alive]
    start = "start one: `python -m worker` with the service's settings, or `spard up` without --no-worker"
    yield from (_in_trouble(each) for each in there if each.troubles)
    if waiting and not held and not there:
        yield problem(
            "workers", f"{waiting} jobs have waited for more than two minutes, and no worker is running.", start
        )
    elif len(running) > held:
        text = (
            f"{len(running) - held} running jobs have had no heartbeat from their workers for {settings.lease_s:g} s."
        )
        yield problem("workers", text, f"look at the workers' logs; {start}. The API gives the jobs back to the queue")
    elif held or there:
        yield ok("workers", f"{len(there)} running, {held} jobs in progress, {waiting} waiting")
    else:
        yield note("workers", "none is running, and no job waits")
    yield _outbox(session)


def serving(settings: Settings, engine: Engine) -> Iterator[Finding]:
    """Check the vLLM server of SPARD_SERVING_URL, if set; report its facts, or the reasons against using it."""
    clients = Clients()
    watch = server_watch(settings, engine, clients)
    if watch is None:
        return

    async def look() -> ServerReport:
        try:
            return await watch.look()
        finally:
            await clients.close()

    report = asyncio.run(look())
    if report.facts is None:
        cure = "start the server, or correct SPARD_SERVING_URL and SPARD_SERVING_API_KEY"
        yield from (problem("serving", each, cure) for each in report.refusals)
        return
    yield from (problem("serving", each, "docs/serving.md has a command that starts it") for each in report.refusals)
    if not report.refusals:
        yield ok("serving", report.facts)
    else:
        yield note("serving", report.facts)


def _in_trouble(worker: WorkerOut) -> Finding:
    text = f"{worker.name} on {worker.host} takes no jobs: {', '.join(worker.troubles)}."
    cure = "fix it on that machine; the worker checks again and continues by itself (docs/reliability.md)"
    return problem("workers", text, cure)


def _outbox(session: Session) -> Finding:
    is_late = Outbox.created_at < db.clock(session) - _LATE
    stuck = select(func.count()).where(Outbox.sent_at.is_(None), is_late)
    if found := session.scalar(stuck):
        cure = "start an API process, which sends them, and see that SPARD_BROKER_URL's server answers"
        return problem("wake-ups", f"{found} wait in the outbox for more than two minutes.", cure)
    return ok("wake-ups", "none is stuck")
