"""Everything that a job depends on, resolved when it was created and kept as JSON in `Job.spec`.

The JSON has the fields' names. Keys that a newer version has written are ignored; keys that an older one has not are
the defaults below. A spec is written once and never again, so nothing that is ignored gets lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache
from typing import Annotated, Any

from pydantic import BeforeValidator, TypeAdapter, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from sqlalchemy import JSON, Dialect, TypeDecorator

from spard.config import ON_FIGURES, Agent, FurtherTuning, GateThresholds, JudgeSpec, RowSignal

VERSION = 3  # of the JSON; 1 had no number, and of the judge its name alone
ASKED_OTHERWISE = 3  # the first version whose audits ask prompts in other ways than plainly and in mined dresses


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRef:
    """A base model as the catalog had it."""

    alias: str
    source: str  # a folder, or the id of a model on the hub
    revision: str | None = None
    learning_rate: float | None = None  # None: the default for its width
    digest: str | None = None  # of its files, in that form; None: not known, and not compared
    rendering: dict[str, object] | None = None  # of its chat template; None: the worker finds out by trying


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRef:
    """A customer's file."""

    id: str
    sha256: str
    storage_key: str
    rows: int = 0  # rows and bytes are 0 where they were not counted
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusRef:
    """One version of a safety pool or of an audit suite."""

    id: str
    kind: str  # pool | harmful | benign | utility
    name: str
    version: int
    sha256: str
    storage_key: str
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFrom:
    """The adapter that the training goes on from."""

    id: str  # of the job that made it
    sha256: str
    storage_key: str
    model: str | None = None
    lineage: tuple[str, ...] = ()  # ids of all jobs before, the first one first, `id` the last


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedRef:
    """The released adapter, or model, that a job audits and does not train."""

    id: str  # of the job that made it
    step: int  # of its checkpoint; 0: what the job has made
    sha256: str
    storage_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegrationRef:
    """A customer's integration that the provider passes on: which tracker, and OpenAI's fields of it."""

    type: str
    project: str
    name: str | None = None
    entity: str | None = None
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRef(GateThresholds):
    """The thresholds of the policy version that was in force, and whether a failed adapter is kept for a waiver.

    A job that was created when any judge decided, and figures and not their bounds, is decided so; benign prompts in a
    dress did not decide then.
    """

    allow_unmeasured_judge: bool = True
    confidence: float = ON_FIGURES
    max_dressed_refusal_rise: float = 1.0
    max_shown_asr_rise: float = 1.0
    max_dressed_asr: float = 1.0
    version: int = 0  # 0: the deployment's settings
    waivers: bool = False

    def thresholds(self) -> GateThresholds:
        """Return the thresholds that the gate compares with."""
        return GateThresholds(**{each.name: getattr(self, each.name) for each in fields(GateThresholds)})


def _if_known(value: object, read: ValidatorFunctionWrapHandler) -> JudgeSpec | None:
    """Return None for a judge that is no longer installed: its jobs can be shown, and those that wait will fail."""
    try:
        judge: JudgeSpec | None = read(value)
    except ValidationError:
        return None
    return judge


def _reads_none(value: object) -> object:
    """Let the judge of an older job read no rows but the flagged ones."""
    return {"read": 0} | value if isinstance(value, dict) else value


_RowSignal = Annotated[RowSignal, BeforeValidator(_reads_none)]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What a job's row keeps, so that nothing changes under it."""

    model: ModelRef
    training_file: ObjectRef
    policy: PolicyRef
    judge: str  # its name; `judge_spec` has the rest, and where that is None the worker's settings do
    judge_spec: Annotated[JudgeSpec | None, WrapValidator(_if_known)] = None  # without its key
    validation_file: ObjectRef | None = None
    pool: CorpusRef | None = None
    suites: tuple[CorpusRef, ...] = ()
    start_from: StartFrom | None = None
    audited: AuditedRef | None = None  # None: the job trains
    row_signal: _RowSignal = field(default_factory=RowSignal)  # of the policy then in force; `off` in older jobs
    further_tuning: FurtherTuning = field(default_factory=FurtherTuning)  # likewise; none in older jobs
    agent: Agent | None = None  # likewise
    checkpoint_prompts: int | None = None  # of each suite that a checkpoint is asked; None: there are no checkpoints
    integrations: tuple[IntegrationRef, ...] = ()  # those that are passed on
    embedder: str | None = None  # a folder or a hub id with its commit; None: the base model itself
    transcripts: bool = False  # of the policy then in force: what the audit asked and heard is kept for the project
    held_out_rows: int = 0  # at most, to show whether the task is learned; 0 in older jobs: nothing is shown
    waived: bool = False  # a provider's measurement: the gate's decision does not hold the adapter back
    request_id: str | None = None  # of the request that created the job, for logs and traces
    traceparent: str | None = None
    version: int = 1


@cache
def _json_form() -> TypeAdapter[JobSpec]:
    return TypeAdapter(JobSpec)


class JobSpecColumn(TypeDecorator[JobSpec]):
    """A `JobSpec` in Python, JSON in the database."""

    impl = JSON
    cache_ok = True

    def process_bind_param(self, value: JobSpec | None, dialect: Dialect) -> Any:
        """Return the JSON of a spec."""
        return None if value is None else _json_form().dump_python(value, mode="json")

    def process_result_value(self, value: Any, dialect: Dialect) -> JobSpec | None:
        """Return the spec of stored JSON; raise `pydantic.ValidationError` for what never was one."""
        return None if value is None else _json_form().validate_python(value)
