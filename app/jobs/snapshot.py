"""Resolve a request into a job spec: everything that a job depends on is looked up once and stored with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from secrets import randbelow

from sqlalchemy.orm import Session
from structlog.contextvars import get_contextvars

from app.catalog import adapters
from app.catalog import service as catalog
from app.catalog.profile import benign_warnings
from app.db.tables import BaseModelEntry, Corpus, File
from app.db.tables.files import FINE_TUNE, PREFERENCE
from app.db.tables.job_spec import VERSION, CorpusRef, IntegrationRef, JobSpec, ModelRef, ObjectRef
from app.errors import InvalidRequest
from app.files import service as files
from app.jobs import lineage, needs, policy_check
from app.jobs.request import JobCreate, Safety
from app.keys.service import Principal
from app.ops import tracing
from app.policies import service as policies
from app.policies.embedders import checked_embedder
from app.policies.schemas import Policy
from app.settings import Settings
from spard.config import Ending, Lora, Quantization, Recipe, Selection
from spard.config.run_spec import parse
from spard.config.selection import CENTERED_STATES, OWN_EMBEDDERS
from spard.data.rows import SAME_FILE

# Check that a job can train on a file: its purpose, rows, method and tools.

SHOWN = 20  # faults of a file, in an error or a warning


def check_file(ask: JobCreate, model: BaseModelEntry, file: File, param: str, min_rows: int) -> None:
    """Raise `InvalidRequest` if a job cannot train on a file.

    `param` names the request field that holds the file; `min_rows` is the least number of rows it must have.
    """
    if file.purpose != FINE_TUNE:
        message = f"{file.id} has the purpose {file.purpose!r}; a job needs {FINE_TUNE!r}."
        raise InvalidRequest(message, code="invalid_training_file", param=param)
    if files.is_unfit(file):
        raise InvalidRequest(
            f"{file.id} cannot be trained on: {file.status_details}",
            code="invalid_training_file",
            param=param,
            details=files.file_errors(file)[:SHOWN],
            details_url=f"/v1/files/{file.id}/validation",
        )
    if (file.row_format == PREFERENCE) != (ask.asked_dpo() is not None):
        has, takes = ("preference pairs", "dpo") if file.row_format == PREFERENCE else ("conversations", "supervised")
        message = f'{file.id} has {has}: the method that trains on them is {{"type": "{takes}"}}.'
        raise InvalidRequest(message, code="method_mismatch", param=param)
    if (file.rows or 0) < min_rows:
        kind = param.replace("_", " ").capitalize()
        message = f"{kind} has {file.rows} example(s), but must have at least {min_rows} examples"
        raise InvalidRequest(message, code="invalid_n_examples", param=param)
    _check_tools(model, file, param)


def _check_tools(model: BaseModelEntry, file: File, param: str) -> None:
    """Refuse a file with tools if the model's chat template does not render them."""
    shown = (file.tool_lines and catalog.tool_support(model)) or {}
    # If the template's support is unknown here, `shown` is empty and the file is accepted.
    missing = {part: line for part, line in (file.tool_lines or {}).items() if not shown.get(part, True)}
    if not missing:
        return
    raise InvalidRequest(
        f"The chat template of {model.alias} does not render {' and '.join(sorted(missing))}: what is not rendered is "
        f"not learned. The first such row is line {min(missing.values())} of {file.id}.",
        code="tools_not_rendered",
        param=param,
        details=[
            {"line": line, "code": "tools_not_rendered", "message": f"{part} is not rendered"}
            for part, line in sorted(missing.items())
        ],
        details_url=f"/v1/files/{file.id}/validation?model={model.alias}",
    )


# Choose the embedder that selects a job's safe rows, from its request, the policy or its base model's entry.


@dataclass(frozen=True, slots=True)
class ChosenEmbedder:
    """The embedder of a job: its name in recipes and reports, and the folder or hub id of its files."""

    name: str
    source: str | None = None  # None: it is the base model


def choose_embedder(caller: Principal, selection: Selection, model: BaseModelEntry, policy: Policy) -> ChosenEmbedder:
    """Return the embedder of a job; raise `InvalidRequest` if this key may not use the one it names.

    The policy's embedder takes precedence over the base model entry's. A customer may name only these two and the base
    model's own states, because any other encoder is a path on the provider's machines.
    """
    asked, is_admin = selection.embedder, "admin" in caller.scopes
    fixed = policy.embedder
    offered = {_embedder_name(source): source for source in (fixed, model.embedder) if source}
    if asked == "auto":
        return _chosen_embedder(fixed or model.embedder or CENTERED_STATES)
    source = offered.get(asked, asked)
    # Customers may name the embedder that the policy fixes or, if it fixes none, our own ones and the offered ones.
    if not is_admin and (fixed not in (None, source) or source not in (*OWN_EMBEDDERS, *offered.values())):
        allowed = ", ".join(repr(name) for name in _allowed_embedders(fixed, offered))
        message = f"The embedder {asked[:64]!r} needs a key with the admin scope; allowed: {allowed}."
        raise InvalidRequest(message, code="embedder_not_allowed", param="safety.selection.embedder")
    return _chosen_embedder(
        source if source in offered.values() else checked_embedder(source, "safety.selection.embedder")
    )


def _allowed_embedders(fixed: str | None, offered: dict[str, str]) -> Iterator[str]:
    yield "auto"
    yield from (_embedder_name(fixed),) if fixed else (*OWN_EMBEDDERS[1:], *offered)


def _chosen_embedder(source: str) -> ChosenEmbedder:
    return ChosenEmbedder(source) if source in OWN_EMBEDDERS else ChosenEmbedder(_embedder_name(source), source)


def _embedder_name(source: str) -> str:
    """Return an embedder's name as customers see it: the folder's last part without its path or revision."""
    return Path(source.partition("@")[0]).name


@dataclass(frozen=True, slots=True)
class Frozen:
    """The recipe of a job, the spec that it applies to, and the warnings that its owner gets before it starts."""

    recipe: Recipe
    spec: JobSpec
    warnings: list[str]
    fault: InvalidRequest | None = None  # of a file; the job is made and fails with it


def resolve_request(session: Session, caller: Principal, ask: JobCreate, settings: Settings) -> Frozen:
    """Check every reference of a request and return the recipe and job spec that it resolves to today.

    Raises `InvalidRequest` for an unknown or disallowed reference. A file that cannot be trained on raises too, or is
    returned as `fault`, as the setting `bad_files` says.
    """
    # Locks all corpora first: a version that is looked up below cannot be deleted before the job is stored.
    catalog.hold(session)
    start, model = _start_and_model(session, caller, ask)
    in_force = policies.current(session, settings)
    policy_check.check(caller, ask, model, in_force.content)
    safety = ask.safety or Safety()
    training = files.get_for_job(session, caller.project_id, ask.training_file, "training_file")
    validation = _validation(session, caller, ask.validation_file)
    fault = _fault(ask, model, training, validation, settings)
    pool = _pool(session, safety)
    embedder = choose_embedder(caller, safety.selection, model, in_force.content)
    recipe = _recipe(ask, safety, model, start, embedder.name)
    # Decided from the recipe, because the memory that the job needs depends on it.
    recipe = replace(recipe, quantization=_quantization(session, start, model, recipe, training.bytes))
    spec = JobSpec(
        version=VERSION,
        model=_model_ref(model),
        start_from=start.reference() if start else None,
        training_file=_object_ref(training),
        validation_file=_object_ref(validation) if validation else None,
        pool=_corpus_ref(pool) if pool else None,
        suites=tuple(_corpus_ref(suite) for suite in _suites(session, safety, pool)),
        policy=policies.reference(in_force),
        judge=settings.judge.name,
        judge_spec=settings.judge,
        row_signal=policy_check.row_signal(caller, safety.defense, in_force.content, has_pool=pool is not None),
        further_tuning=in_force.content.further_tuning,
        agent=in_force.content.agent.settings() if in_force.content.agent else None,
        checkpoint_prompts=settings.checkpoint_prompts,
        integrations=tuple(_integrations(ask, settings)),
        embedder=embedder.source,
        transcripts=in_force.content.transcripts,
        held_out_rows=settings.held_out_rows if ask.held_out_rows is None else ask.held_out_rows,
        probe_steps=settings.probe_steps,
        evidence_reference=model.evidence_reference if settings.probe_steps else None,
        waived=policy_check.is_waived(caller, safety.defense),
        request_id=get_contextvars().get("request_id"),
        traceparent=tracing.traceparent(),
    )
    # On the recipe rather than the request, so that defaults are checked too.
    policy_check.check_ranges(caller, recipe, in_force.content)
    of_job = (*_otherwise(ask, settings), *_in_nf4(recipe, model), *_of_pool(recipe, pool))
    return Frozen(recipe, spec, [*_warnings(training, validation), *of_job], fault)


def _start_and_model(
    session: Session, caller: Principal, ask: JobCreate
) -> tuple[lineage.Start | None, BaseModelEntry]:
    """Return the adapter that the job starts from, if any, and its base model, checked against each other."""
    start = lineage.start(session, caller, ask)
    model = _model(session, start.job.model if start else ask.model)
    lineage.check(start, ask, model)
    return start, model


def _quantization(
    session: Session, start: lineage.Start | None, model: BaseModelEntry, recipe: Recipe, file_bytes: int
) -> Quantization:
    """Return the quantization of the base model.

    A job that starts from an adapter keeps the quantization that the adapter was trained on.
    """
    if start:
        held: Quantization = parse(Quantization, start.job.recipe.get("quantization", "none"), "quantization")
        return held
    rooms = needs.gpu_rooms(session) if model.quantization == "if_needed" else []
    return needs.decide_quantization(model.quantization, model.source, recipe, file_bytes, rooms)


def _in_nf4(recipe: Recipe, model: BaseModelEntry) -> Iterator[str]:
    if recipe.quantization != "none":
        yield f"The job trains on {model.alias} in NF4, 4 bits a weight: its adapter is measured and served on that."


def _of_pool(recipe: Recipe, pool: Corpus | None) -> list[str]:
    return benign_warnings(pool.benign_rows) if pool and recipe.uses_benign_rows else []


def _validation(session: Session, caller: Principal, file_id: str | None) -> File | None:
    return files.get_for_job(session, caller.project_id, file_id, "validation_file") if file_id is not None else None


def _model_ref(model: BaseModelEntry) -> ModelRef:
    return ModelRef(
        alias=model.alias,
        source=model.source,
        revision=model.revision,
        learning_rate=model.learning_rate,
        digest=model.digest,
        rendering=model.rendering,
    )


def _recipe(
    ask: JobCreate, safety: Safety, model: BaseModelEntry, start: lineage.Start | None, embedder: str
) -> Recipe:
    """Return the requested recipe; raise `InvalidRequest` if the model has no such modules to adapt."""
    lora = start.lora if start else adapters.with_default(ask.lora or Lora(), model)
    recipe = Recipe(
        defense=safety.defense,
        selection=replace(safety.selection, embedder=embedder),
        lora=None if ask.full_fine_tuning else lora,
        hyperparameters=ask.asked_hyperparameters(),
        audit=safety.audit,
        seed=randbelow(2**31) if ask.seed is None else ask.seed,
        max_seq_length=ask.max_seq_length,
        learning_rate=model.learning_rate,
        dpo=ask.asked_dpo(),
        ending=ask.ending or Ending(),
        optimizer=ask.optimizer,
    )
    adapters.check_recipe(recipe, model)
    return recipe


def _model(session: Session, alias: str) -> BaseModelEntry:
    model = session.get(BaseModelEntry, alias)
    if model is None:
        offered = ", ".join(entry.alias for entry in catalog.base_models(session)) or "none yet"
        message = f"The model {alias[:128]!r} does not exist or cannot be fine-tuned; available: {offered}."
        raise InvalidRequest(message, code="model_not_found", param="model")
    return model


def _fault(
    ask: JobCreate, model: BaseModelEntry, training: File, validation: File | None, settings: Settings
) -> InvalidRequest | None:
    """Return why the job cannot train on its files, or None; raise it if `bad_files` is `reject`."""
    try:
        check_file(ask, model, training, "training_file", settings.min_rows)
        if validation is not None:
            check_file(ask, model, validation, "validation_file", 1)
    except InvalidRequest as fault:
        if settings.bad_files == "reject":
            raise
        return fault
    return None


def _pool(session: Session, safety: Safety) -> Corpus | None:
    """Return the safety pool; None if there is no pool and the defense does not need one."""
    pool = catalog.pool(session, safety.pool)
    if pool is None and safety.pool is not None:
        raise InvalidRequest("There is no such safety pool.", code="pool_not_found", param="safety.pool")
    if pool is None and safety.defense.trains_on_safe_rows:
        message = (
            "There is no safety pool yet, and the defense trains on one. The provider imports it with "
            "`spard pool import FILE.jsonl --name NAME` or POST /v1/admin/pools (rows {prompt, safe})."
        )
        raise InvalidRequest(message, code="no_safety_pool", param="safety.pool")
    return pool


def _suites(session: Session, safety: Safety, pool: Corpus | None) -> list[Corpus]:
    """Return the requested suites, by default all current ones.

    If none of them attacks the model, the suite that was held out of the pool is added.
    """
    suites = catalog.current_suites(session)
    if safety.audit.suites is not None:
        unknown = sorted(set(safety.audit.suites) - {suite.name for suite in suites})
        if unknown:
            names = ", ".join(suite.name for suite in suites) or "none yet"
            message = f"There is no suite {unknown[0][:64]!r}; available: {names}."
            raise InvalidRequest(message, code="suite_not_found", param="safety.audit.suites")
        suites = [suite for suite in suites if suite.name in safety.audit.suites]
    return catalog.add_held_out_suite(session, suites, pool)


def _warnings(training: File, validation: File | None) -> list[str]:
    found = [each for file in (training, validation) if file for each in files.file_findings(file)]
    warnings = [each.text for each in found if each.severity == "warning"][:SHOWN]
    if validation and validation.sha256 == training.sha256:
        warnings.append(SAME_FILE)
    return warnings


def _integrations(ask: JobCreate, settings: Settings) -> Iterator[IntegrationRef]:
    """Yield the requested integrations that the provider has turned on."""
    for each in ask.integrations or ():
        if each.type in (settings.integrations or ()) and (to := each.wandb):
            tags = tuple(to.tags or ())
            yield IntegrationRef(type=each.type, project=to.project, name=to.name, entity=to.entity, tags=tags)


def _otherwise(ask: JobCreate, settings: Settings) -> Iterator[str]:
    """Yield a warning for each part of the request that is not fulfilled literally."""
    if (name := ask.suffix_in_name()) != ask.suffix:
        yield f"The suffix {ask.suffix!r} is {name!r} in the model's name."
    for each in ask.integrations or ():
        if each.type not in (settings.integrations or ()):
            yield f"The integration {each.type[:64]!r} is left out: the provider has not turned it on."
        elif each.wandb is None:
            yield f"The integration {each.type[:64]!r} is left out: it says no project."


def _object_ref(file: File) -> ObjectRef:
    return ObjectRef(
        id=file.id, sha256=file.sha256, storage_key=file.storage_key, rows=file.rows or 0, bytes=file.bytes
    )


def _corpus_ref(corpus: Corpus) -> CorpusRef:
    return CorpusRef(**{each.name: getattr(corpus, each.name) for each in fields(CorpusRef)})
