"""Everything that a job depends on is looked up once, when it is created, and never changes under it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from secrets import randbelow
from typing import Any

from sqlalchemy.orm import Session

from app.catalog import service as catalog
from app.errors import InvalidRequest
from app.files import service as files
from app.jobs import lineage, policy
from app.jobs.request import JobCreate, Safety
from app.keys.service import Principal
from app.models import BaseModelEntry, Corpus, File
from app.policies import service as policies
from app.settings import Settings
from spard.config import Lora, Recipe, uses_safe_rows

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Frozen:
    """The recipe, what it is applied to, and what the customer should know before it starts."""

    recipe: dict[str, Any]
    spec: dict[str, Any]
    warnings: list[str]


def freeze(session: Session, caller: Principal, ask: JobCreate, settings: Settings) -> Frozen:
    """Check every reference of a request and note what exactly it stands for today."""
    catalog.hold(session)
    start = lineage.start(session, caller, ask)
    model = _model(session, start.job.model if start else ask.model)
    if start:
        lineage.check(start, ask, model)
    in_force = policies.current(session, settings)
    policy.check(caller, ask, model, in_force.content)
    safety = ask.safety or Safety()
    training = _file(session, caller, ask.training_file, "training_file", settings.min_rows)
    validation = ask.validation_file and _file(session, caller, ask.validation_file, "validation_file", 1)
    pool = _pool(session, safety)
    spec = {
        "model": {name: getattr(model, name) for name in ("alias", "source", "revision", "learning_rate")},
        "start_from": start.spec() if start else None,
        "training_file": _file_spec(training),
        "validation_file": _file_spec(validation) if validation else None,
        "pool": _corpus_spec(pool) if pool else None,
        "suites": [_corpus_spec(suite) for suite in _suites(session, safety, pool)],
        "policy": policies.frozen(in_force),
        "judge": settings.judge,
        "waived": policy.is_waived(caller, safety),
    }
    recipe = _recipe(ask, safety, model, start.lora if start else ask.lora or Lora())
    policy.check_ranges(caller, recipe, in_force.content)
    return Frozen(recipe, spec, _warnings(training, validation or None))


def _recipe(ask: JobCreate, safety: Safety, model: BaseModelEntry, lora: Lora) -> dict[str, Any]:
    recipe = Recipe(
        defense=safety.defense,
        selection=safety.selection,
        lora=None if ask.full_fine_tuning else lora,
        hyperparameters=ask.asked_hyperparameters(),
        audit=safety.audit,
        seed=randbelow(2**31) if ask.seed is None else ask.seed,
        max_seq_length=ask.max_seq_length,
        learning_rate=model.learning_rate,
    )
    return asdict(recipe)


def _model(session: Session, alias: str) -> BaseModelEntry:
    model = session.get(BaseModelEntry, alias)
    if model is None:
        offered = ", ".join(entry.alias for entry in catalog.base_models(session)) or "none yet"
        message = f"The model {alias[:128]!r} does not exist or cannot be fine-tuned; available: {offered}."
        raise InvalidRequest(message, code="model_not_found", param="model")
    return model


def _file(session: Session, caller: Principal, file_id: str, param: str, min_rows: int) -> File:
    """A file that can be trained on."""
    file = files.get_for_job(session, caller.tenant_id, file_id, param)
    if file.purpose != files.FINE_TUNE:
        message = f"{file.id} has the purpose {file.purpose!r}; a job needs {files.FINE_TUNE!r}."
        raise InvalidRequest(message, code="invalid_training_file", param=param)
    if file.status != "processed":
        raise InvalidRequest(
            f"{file.id} cannot be trained on: {file.status_details}",
            code="invalid_training_file",
            param=param,
            details=files.errors_of(file)[:_SHOWN],
            details_url=f"/v1/files/{file.id}/validation",
        )
    if (file.rows or 0) < min_rows:
        kind = param.replace("_", " ").capitalize()
        message = f"{kind} has {file.rows} example(s), but must have at least {min_rows} examples"
        raise InvalidRequest(message, code="invalid_n_examples", param=param)
    return file


def _pool(session: Session, safety: Safety) -> Corpus | None:
    """The safety pool; plain fine-tuning goes without when there is none."""
    pool = catalog.pool(session, safety.pool)
    if pool is None and safety.pool is not None:
        raise InvalidRequest("There is no such safety pool.", code="pool_not_found", param="safety.pool")
    if pool is None and uses_safe_rows(safety.defense):
        message = (
            "There is no safety pool yet, and the defence trains on one. The provider imports it with "
            "`spard pool import FILE.jsonl --name NAME` or POST /v1/admin/pools (rows {prompt, safe})."
        )
        raise InvalidRequest(message, code="no_safety_pool", param="safety.pool")
    return pool


def _suites(session: Session, safety: Safety, pool: Corpus | None) -> list[Corpus]:
    """What is measured: the suites asked for, or all; without any attack among them, those held out of the pool."""
    suites = catalog.current_suites(session)
    if safety.audit.suites is not None:
        unknown = sorted(set(safety.audit.suites) - {suite.name for suite in suites})
        if unknown:
            names = ", ".join(suite.name for suite in suites) or "none yet"
            message = f"There is no suite {unknown[0][:64]!r}; available: {names}."
            raise InvalidRequest(message, code="suite_not_found", param="safety.audit.suites")
        suites = [suite for suite in suites if suite.name in safety.audit.suites]
    return catalog.with_held_out(session, suites, pool)


def _warnings(training: File, validation: File | None) -> list[str]:
    found = [problem for file in (training, validation) if file for problem in file.problems or []]
    warnings = [f"line {problem['line']}: {problem['message']}" for problem in found[:_SHOWN]]
    if validation and validation.sha256 == training.sha256:
        warnings.append("The validation file is the training file: its losses say nothing about other data.")
    return warnings


def _file_spec(file: File) -> dict[str, Any]:
    return {name: getattr(file, name) for name in ("id", "sha256", "storage_key", "rows", "bytes")}


def _corpus_spec(corpus: Corpus) -> dict[str, Any]:
    return {name: getattr(corpus, name) for name in ("id", "kind", "name", "version", "sha256", "storage_key", "rows")}
