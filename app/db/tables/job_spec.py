"""Define the job spec: everything that a job depends on, resolved at its creation and stored as JSON in `Job.spec`.

The JSON has the fields' names. Keys of newer versions are ignored; keys missing in older ones have the defaults below.
A spec is written only once, so ignored keys are not lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache
from typing import Annotated, Any

from pydantic import BeforeValidator, TypeAdapter, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from sqlalchemy import JSON, Dialect, TypeDecorator

from spard.config import ON_FIGURES, Agent, FurtherTuning, GateThresholds, JudgeSpec, RowSignal

VERSION = 3  # of the JSON; version 1 had no number, and only the judge's name
ASKED_OTHERWISE = 3  # first version whose audits also use other disguises than mined ones


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRef:
    """A base model as it was in the catalog."""

    alias: str
    source: str  # a folder, or the id of a model on the hub
    revision: str | None = None
    learning_rate: float | None = None  # None: the default for its width
    digest: str | None = None  # digest of its files; None: unknown, and not compared
    rendering: dict[str, object] | None = None  # of its chat template; None: the worker determines it


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRef:
    """A customer's file."""

    id: str
    sha256: str
    storage_key: str
    rows: int = 0  # rows and bytes are 0 if they were not counted
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
    """The adapter that training starts from."""

    id: str  # of the job that made it
    sha256: str
    storage_key: str
    model: str | None = None
    lineage: tuple[str, ...] = ()  # ids of all earlier jobs, first to last; `id` is the last


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedRef:
    """The released adapter or model that a later audit's job audits."""

    id: str  # of the job that made it
    step: int  # of its checkpoint; 0: the job's model
    sha256: str
    storage_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegrationRef:
    """A requested integration that the provider has turned on: the tracker and OpenAI's fields for it."""

    type: str
    project: str
    name: str | None = None
    entity: str | None = None
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRef(GateThresholds):
    """The thresholds of the policy version in force, and whether a failed adapter is kept for a waiver.

    The defaults are those of jobs from before a field existed: any judge may decide, figures instead of their bounds
    are compared, and disguised benign prompts do not count.
    """

    allow_unmeasured_judge: bool = True
    confidence: float = ON_FIGURES
    max_dressed_refusal_rise: float = 1.0
    max_shown_asr_rise: float = 1.0
    max_dressed_asr: float = 1.0
    version: int = 0  # 0: the deployment's settings
    waivers: bool = False

    def thresholds(self) -> GateThresholds:
        """Return the gate's thresholds."""
        return GateThresholds(**{each.name: getattr(self, each.name) for each in fields(GateThresholds)})


def _if_known(value: object, read: ValidatorFunctionWrapHandler) -> JudgeSpec | None:
    """Return None for a judge that is no longer installed: its jobs stay readable, and waiting ones fail."""
    try:
        judge: JudgeSpec | None = read(value)
    except ValidationError:
        return None
    return judge


def _reads_none(value: object) -> object:
    """Default `read` to 0 for older jobs: their judge reads no rows except the flagged ones."""
    return {"read": 0} | value if isinstance(value, dict) else value


_RowSignal = Annotated[RowSignal, BeforeValidator(_reads_none)]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """Everything that a job depends on; it never changes after the job's creation."""

    model: ModelRef
    training_file: ObjectRef
    policy: PolicyRef
    judge: str  # its name; the rest is in `judge_spec` or, if that is None, in the worker's settings
    judge_spec: Annotated[JudgeSpec | None, WrapValidator(_if_known)] = None  # without its key
    validation_file: ObjectRef | None = None
    pool: CorpusRef | None = None
    suites: tuple[CorpusRef, ...] = ()
    start_from: StartFrom | None = None
    audited: AuditedRef | None = None  # None: the job trains
    row_signal: _RowSignal = field(default_factory=RowSignal)  # from the policy in force; `off` in older jobs
    further_tuning: FurtherTuning = field(default_factory=FurtherTuning)  # likewise; absent in older jobs
    agent: Agent | None = None  # likewise
    checkpoint_prompts: int | None = None  # prompts of each suite for a checkpoint; None: no checkpoints
    integrations: tuple[IntegrationRef, ...] = ()  # only those that the provider has turned on
    embedder: str | None = None  # a folder or a hub id with its commit; None: the base model itself
    transcripts: bool = False  # from the policy in force: prompts and replies of the audit are stored
    held_out_rows: int = 0  # most rows to measure the task on; 0 in older jobs: not measured
    probe_steps: int = 0  # of the undefended probe; 0 in older jobs: none
    # The base model's reference for the probe when the job was made; None: there was none
    evidence_reference: dict[str, object] | None = None
    waived: bool = False  # a provider's measurement: the adapter is released whatever the gate decides
    request_id: str | None = None  # of the request that created the job, for logs and traces
    traceparent: str | None = None
    version: int = 1


@cache
def _json_form() -> TypeAdapter[JobSpec]:
    return TypeAdapter(JobSpec)


class JobSpecColumn(TypeDecorator[JobSpec]):
    """A column that is a `JobSpec` in Python and JSON in the database."""

    impl = JSON
    cache_ok = True

    def process_bind_param(self, value: JobSpec | None, dialect: Dialect) -> Any:
        """Return a spec as JSON."""
        return None if value is None else _json_form().dump_python(value, mode="json")

    def process_result_value(self, value: Any, dialect: Dialect) -> JobSpec | None:
        """Return the spec for stored JSON; raise `pydantic.ValidationError` for invalid JSON."""
        return None if value is None else _json_form().validate_python(value)
