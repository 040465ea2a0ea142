"""Resolve a request for a job: everything that it refers to is looked up once and stored with the job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from secrets import randbelow

from sqlalchemy.orm import Session
from structlog.contextvars import get_contextvars

from app.catalog import fitness
from app.catalog import service as catalog
from app.db.tables import BaseModelEntry, Corpus, File
from app.db.tables.job_spec import VERSION, CorpusRef, IntegrationRef, JobSpec, ModelRef, ObjectRef
from app.errors import InvalidRequest
from app.files import service as files
from app.jobs import needs, project_models
from app.jobs.request import JobCreate, Safety
from app.keys import Principal
from app.ops import tracing
from app.policies import service as policies
from app.policies.schemas import Policy, PolicyOut
from app.policies.service import checked_embedder
from app.settings import Settings
from spard.config import AUDITS, Defense, Ending, Lora, Quantization, Recipe, RowSignal, Selection
from spard.config.run_spec import parse
from spard.config.settings import CENTERED_STATES, OWN_EMBEDDERS


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The recipe of a job, the spec that it applies to, and the warnings that its owner gets before it starts."""

    recipe: Recipe
    spec: JobSpec
    warnings: list[str]
    fault: InvalidRequest | None = None  # of a file; the job is made and fails with it


@dataclass(eq=False)
class ResolvedRequest:
    """A request for a job and all that it refers to today; `app.jobs.checks` decides if the job may be made.

    Each part is looked up when it is first read and only then, so the order of the checks is the order of the lookups:
    nothing is looked up for a request that an earlier check refuses. Reading a part raises `InvalidRequest` if the
    request names one that does not exist.

    warnings  texts that the checks have added for the job's owner
    fault     why the job will fail on its files, if the setting `bad_files` makes such jobs
    """

    session: Session
    caller: Principal
    ask: JobCreate
    settings: Settings
    warnings: list[str] = field(default_factory=list)
    fault: InvalidRequest | None = None

    @cached_property
    def safety(self) -> Safety:
        """The requested safety settings, or their defaults; an audit that is not requested has the policy's size."""
        safety = self.ask.safety or Safety()
        if "audit" in safety.model_fields_set:
            return safety
        return safety.model_copy(update={"audit": AUDITS[self.policy.audit]})

    @cached_property
    def start(self) -> project_models.Start | None:
        """The adapter that the job starts from; None if it starts from a base model."""
        return project_models.find_start(self.session, self.caller, self.ask)

    @cached_property
    def model(self) -> BaseModelEntry:
        """The catalog's entry of the base model."""
        alias = self.start.job.model if self.start else self.ask.model
        model = self.session.get(BaseModelEntry, alias)
        if model is None:
            offered = ", ".join(entry.alias for entry in catalog.base_models(self.session)) or "none yet"
            message = f"The model {alias[:128]!r} does not exist or cannot be fine-tuned; available: {offered}."
            raise InvalidRequest(message, code="model_not_found", param="model")
        return model

    @cached_property
    def in_force(self) -> PolicyOut:
        """The version of the policy that applies to the job."""
        return policies.current(self.session, self.settings)

    @property
    def policy(self) -> Policy:
        """The rules of the version in force."""
        return self.in_force.content

    @cached_property
    def training(self) -> File:
        """The training file."""
        return files.get_for_job(self.session, self.caller.project_id, self.ask.training_file, "training_file")

    @cached_property
    def validation(self) -> File | None:
        """The validation file; None if the request names none."""
        file_id = self.ask.validation_file
        if file_id is None:
            return None
        return files.get_for_job(self.session, self.caller.project_id, file_id, "validation_file")

    @cached_property
    def pool(self) -> Corpus | None:
        """The safety pool: the requested version or the current one; None if the provider has none."""
        pool = catalog.pool(self.session, self.safety.pool)
        if pool is None and self.safety.pool is not None:
            raise InvalidRequest("There is no such safety pool.", code="pool_not_found", param="safety.pool")
        return pool

    @cached_property
    def suites(self) -> list[Corpus]:
        """The requested suites, by default all current ones.

        If none of them attacks the model, the suite that was held out of the pool is added.
        """
        suites, asked = catalog.current_suites(self.session), self.safety.audit.suites
        if asked is not None:
            unknown = sorted(set(asked) - {suite.name for suite in suites})
            if unknown:
                names = ", ".join(suite.name for suite in suites) or "none yet"
                message = f"There is no suite {unknown[0][:64]!r}; available: {names}."
                raise InvalidRequest(message, code="suite_not_found", param="safety.audit.suites")
            suites = [suite for suite in suites if suite.name in asked]
        return catalog.add_held_out_suite(self.session, suites, self.pool)

    @cached_property
    def embedder(self) -> ChosenEmbedder:
        """The embedder that selects the job's safe rows."""
        return choose_embedder(self.caller, self.safety.selection, self.model, self.policy)

    @cached_property
    def requested_recipe(self) -> Recipe:
        """The requested recipe, before the quantization of its base model is decided."""
        ask, safety = self.ask, self.safety
        lora = self.start.lora if self.start else fitness.with_default(ask.lora or Lora(), self.model)
        return Recipe(
            defense=safety.defense,
            selection=replace(safety.selection, embedder=self.embedder.name),
            lora=None if ask.full_fine_tuning else lora,
            hyperparameters=ask.asked_hyperparameters(),
            audit=safety.audit,
            seed=randbelow(2**31) if ask.seed is None else ask.seed,
            max_seq_length=ask.max_seq_length,
            learning_rate=self.model.learning_rate,
            dpo=ask.asked_dpo(),
            ending=ask.ending or Ending(),
            optimizer=ask.optimizer,
        )

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe that the job is trained with.

        A job that starts from an adapter keeps the quantization that the adapter was trained on.
        """
        model, recipe = self.model, self.requested_recipe
        quantization: Quantization
        if self.start:
            quantization = parse(Quantization, self.start.job.recipe.get("quantization", "none"), "quantization")
        else:
            # Decided from the rest of the recipe, because the memory that the job needs depends on it.
            rooms = needs.gpu_rooms(self.session) if model.quantization == "if_needed" else []
            size = self.training.bytes
            quantization = needs.decide_quantization(model.quantization, model.source, recipe, size, rooms)
        return replace(recipe, quantization=quantization)

    @cached_property
    def row_signal(self) -> RowSignal:
        """The row signal that applies to the job under the policy."""
        return row_signal(self.caller, self.safety.defense, self.policy, has_pool=self.pool is not None)

    def snapshot(self) -> Snapshot:
        """Return the snapshot: recipe, job spec and warnings, and the fault of a file if it has one."""
        ask, settings, policy = self.ask, self.settings, self.policy
        spec = JobSpec(
            version=VERSION,
            model=ModelRef(**{each.name: getattr(self.model, each.name) for each in fields(ModelRef)}),
            start_from=self.start.reference() if self.start else None,
            training_file=_object_ref(self.training),
            validation_file=_object_ref(self.validation) if self.validation else None,
            pool=_corpus_ref(self.pool) if self.pool else None,
            suites=tuple(_corpus_ref(suite) for suite in self.suites),
            policy=policies.reference(self.in_force),
            judge=settings.judge.name,
            judge_spec=settings.judge,
            row_signal=self.row_signal,
            further_tuning=policy.further_tuning,
            agent=policy.agent.settings() if policy.agent else None,
            checkpoint_prompts=settings.checkpoint_prompts,
            integrations=tuple(_integrations(ask, settings)),
            embedder=self.embedder.source,
            transcripts=policy.transcripts,
            held_out_rows=settings.held_out_rows if ask.held_out_rows is None else ask.held_out_rows,
            probe_steps=settings.probe_steps,
            evidence_reference=self.model.evidence_reference if settings.probe_steps else None,
            waived=is_waived(self.caller, self.safety.defense),
            request_id=get_contextvars().get("request_id"),
            traceparent=tracing.traceparent(),
        )
        return Snapshot(self.recipe, spec, self.warnings, self.fault)


def is_waived(caller: Principal, defense: Defense) -> bool:
    """Return True if the job is a provider's undefended measurement.

    Its adapter is released to the provider whatever the gate decides.
    """
    return defense.is_baseline and "admin" in caller.scopes


def row_signal(caller: Principal, defense: Defense, policy: Policy, *, has_pool: bool) -> RowSignal:
    """Return the row signal that applies to a job under the policy.

    A provider's measurement is trained on every row. Raises `InvalidRequest` if the job cannot carry out the policy's
    action, for example to defend rows without a safety pool.
    """
    asked = policy.row_signal
    if asked.action in ("off", "report"):
        return asked
    # `auto` compares rows with the pool; without one it only reports.
    if is_waived(caller, defense) or (asked.action == "auto" and not has_pool):
        return replace(asked, action="report")
    if not has_pool:
        message = f"The policy's action for rows, {asked.action}, needs a safety pool, and there is none yet."
        raise InvalidRequest(message, code="no_safety_pool", param="safety.pool")
    if asked.action == "defend" and not defense.trains_on_safe_rows:
        message = f"The policy asks to defend rows, and the defense {defense.type!r} trains on no safe rows."
        raise InvalidRequest(message, code="defense_not_allowed", param="safety.defense.type")
    return asked


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


def _integrations(ask: JobCreate, settings: Settings) -> Iterator[IntegrationRef]:
    """Yield the requested integrations that the provider has turned on."""
    for each in ask.integrations or ():
        if each.type in (settings.integrations or ()) and (to := each.wandb):
            tags = tuple(to.tags or ())
            yield IntegrationRef(type=each.type, project=to.project, name=to.name, entity=to.entity, tags=tags)


def _object_ref(file: File) -> ObjectRef:
    return ObjectRef(
        id=file.id, sha256=file.sha256, storage_key=file.storage_key, rows=file.rows or 0, bytes=file.bytes
    )


def _corpus_ref(corpus: Corpus) -> CorpusRef:
    return CorpusRef(**{each.name: getattr(corpus, each.name) for each in fields(CorpusRef)})
