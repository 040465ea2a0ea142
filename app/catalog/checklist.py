"""What a provider still has to do before a job can pass: the one list for `/provider`, `spard doctor` and `spard up`.

The same reasons become warnings of a job, in its estimate and when it is created (`job_warnings`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy.orm import Session

from app.catalog import service
from app.catalog.fitness import errs_on_model, is_judge_measured
from app.catalog.profile import benign_warnings
from app.db.tables import BaseModelEntry, Corpus, Job
from app.policies import service as policies
from app.settings import Settings
from spard.config import GateThresholds

MIN_ATTACKS = 20  # with fewer scored prompts the gate is inconclusive
_MANY_REFUSED = 0.1  # of the harmless requests: from here on, a base model's refusal of a row says little about harm
_AUDITS = 20  # latest jobs of a model that are searched for its figures
_ADD_BENIGN = "spard suites import HARMLESS.jsonl --name NAME --kind benign"
_ADD_TASK = "spard suites import TASK.jsonl --name NAME --kind utility"


State = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the list.

    name    what it is about: `models`, `pool` or `suites`
    state   `problem` if no job can pass, `note` if audits say less than they could, else `ok`
    text    one sentence
    cure    what the provider does about it; empty if `ok`
    """

    name: Literal["models", "pool", "suites"]
    state: State
    text: str
    cure: str = ""


def checklist(session: Session, settings: Settings) -> list[Point]:
    """Return all points: each base model's, the pool's, and one for each kind of suite."""
    offered = service.base_models(session)
    limits = policies.current(session, settings).content.thresholds
    add_model = Point("models", "problem", "No base model is offered.", "spard models add NAME FOLDER_OR_HUB_ID")
    of_models = [point for entry in offered for point in model_points(session, entry, settings, limits)]
    return [*(of_models or [add_model]), *corpus_points(session)]


def open_points(points: Sequence[Point]) -> list[Point]:
    """Return the points with something left to do, problems first."""
    return sorted((each for each in points if each.state != "ok"), key=lambda each: each.state != "problem")


def model_points(
    session: Session, entry: BaseModelEntry, settings: Settings, limits: GateThresholds
) -> Iterator[Point]:
    """Yield two points on a base model: is the judge measured for it, and does it refuse many harmless requests."""
    alias, judge = entry.alias, settings.judge.name
    if errs_on_model(entry.source, entry.digest, settings, limits):
        text = (
            f"{alias}: the judge {judge} was measured on its replies and errs too often to decide, so no gate passes."
        )
        yield Point("models", "problem", text, "label more replies, or take another judge with SPARD_JUDGE")
    elif is_judge_measured(entry.source, entry.digest, settings, limits):
        yield Point("models", "ok", f"{alias}: the judge {judge} may decide.")
    else:
        text = f"{alias}: nobody measured how often the judge {judge} errs, so no gate passes."
        cure = "spard judge --json > judge.json, and set SPARD_JUDGE_ERRORS=judge.json; "
        cure += "or, with labeled replies of this model, spard judge --labeled FILE --model FOLDER"
        yield Point("models", "problem", text, cure)
    refused = refused_share(session, entry)
    if refused is None:
        text = f"{alias}: its refusals of harmless requests are not known before an audit with a benign suite."
        yield Point("models", "note", text, "they are shown here after the first job")
    elif refused >= _MANY_REFUSED:
        text = f"{alias}: it refused {refused:.0%} of the harmless requests in its last audit."
        cure = "customers may lose harmless rows: watch `too_many_rows_dropped`, or offer another model"
        yield Point("models", "note", text, cure)
    else:
        yield Point("models", "ok", f"{alias}: it refused {refused:.0%} of the harmless requests in its last audit.")


def corpus_points(session: Session) -> Iterator[Point]:
    """Yield the points of the pool, and of the harmful, benign and utility suites."""
    pool, suites = service.current_corpora(session)
    if pool is None:
        cure = "spard pool import POOL.jsonl --name general-safe"
        yield Point("pool", "problem", "No safety pool is imported.", cure)
    elif lacks := benign_warnings(pool.benign_rows):
        text, _, cure = lacks[0].partition(". ")
        yield Point("pool", "note", f"{pool.name} version {pool.version}: {text}.", cure.rstrip("."))
    else:
        yield Point("pool", "ok", f"{pool.name} version {pool.version}, {pool.rows} rows")
    yield _attacks_point(session, pool, suites)
    kinds = {each.kind for each in suites}
    for kind, what, cure in (
        ("benign", "refusals of harmless requests", _ADD_BENIGN),
        ("utility", "whether a model has lost what it could do", _ADD_TASK),
    ):
        if kind in kinds:
            yield Point("suites", "ok", f"There is a suite of kind {kind}.")
        else:
            yield Point("suites", "note", f"No suite of kind {kind} is imported: audits do not measure {what}.", cure)


def _attacks_point(session: Session, pool: Corpus | None, suites: Sequence[Corpus]) -> Point:
    cure = "spard suites import ATTACKS.jsonl --name NAME --kind harmful"
    own = [suite for suite in suites if suite.kind == service.HARMFUL]
    asked = sum(suite.rows for suite in own)
    if not own:
        held = service.held_out_suite(session, pool) if pool else None
        text = f"the only attacks are {held.rows} prompts held out of the pool" if held else "the audit asks no attacks"
        state: State = "note" if held and held.rows >= MIN_ATTACKS else "problem"
        return Point("suites", state, f"No suite of harmful prompts is imported: {text}.", cure)
    if asked < MIN_ATTACKS:
        text = f"The suites of kind harmful have {asked} prompts, and no gate decides on fewer than {MIN_ATTACKS}."
        return Point("suites", "problem", text, cure)
    return Point("suites", "ok", f"The suites of kind harmful have {asked} prompts.")


def refused_share(session: Session, entry: BaseModelEntry) -> float | None:
    """Return the share of harmless requests that a base model refused in the latest audit; None if none asked any."""
    latest = service.select_ended_jobs(entry.alias, Job.spec, Job.safety)
    for spec, safety in session.execute(latest.limit(_AUDITS)):
        figures = (safety or {}).get("over_refusal")
        is_same = (spec.model.source, spec.model.revision) == (entry.source, entry.revision)
        if is_same and figures is not None and figures["base"] is not None:
            return float(figures["base"])
    return None


def job_warnings(
    session: Session, entry: BaseModelEntry, suites: Sequence[Corpus], settings: Settings, limits: GateThresholds
) -> list[str]:
    """Return warnings for a job's owner if a job with these suites, whatever its file, cannot pass or may lose rows."""
    found = []
    if not is_judge_measured(entry.source, entry.digest, settings, limits):
        found.append(
            f"No audit of a model from {entry.alias} can pass yet: it is not known how often the service's judge errs "
            "on it. The job would train and end without a released model. Ask the provider to measure the judge first."
        )
    attacks = sum(suite.rows for suite in suites if suite.kind == service.HARMFUL)
    if attacks < MIN_ATTACKS:
        found.append(
            f"The audit has {attacks} attacks to ask, and the gate decides on no fewer than {MIN_ATTACKS}: the job "
            "would train and end without a released model. Ask the provider for a suite of kind harmful."
        )
    refused = refused_share(session, entry)
    if refused is not None and refused >= _MANY_REFUSED:
        found.append(
            f"{entry.alias} itself refused {refused:.0%} of the harmless requests in its last audit, so it may take "
            "harmless rows of the file for harmful ones, and a job that would lose many rows ends before it trains."
        )
    return found
