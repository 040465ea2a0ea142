"""The safety report of a run, `safety.json`: a typed record with a tolerant reader. Only the standard library is used.

The names of the fields are the keys of the file. Reports of earlier versions can be read: what a file lacks is empty or
None, and what it has beside the fields is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

from spard.config import GateThresholds, Resolved
from spard.config.run_spec import to_mapping
from spard.evaluation.gate import Gate
from spard.evaluation.results import SuiteResult
from spard.release.after_tuning import AfterTuning
from spard.release.agent import AgentRecord
from spard.release.audit_engine_record import AuditEngineRecord
from spard.release.compute_record import ComputeRecord
from spard.release.embedder_record import EmbedderRecord
from spard.release.ending_record import EndingRecord
from spard.release.figure_records import Lengths, RowsMap, ScoreCounts
from spard.release.figure_records import ValidationLoss as ValidationLoss
from spard.release.records import optional
from spard.release.records import read_record as read_record
from spard.release.row_records import RiskyRow, RowSignalRecord, SafeAnswers

Decision = Literal["pass", "fail", "inconclusive", "waived"]


@dataclass(frozen=True, slots=True)
class Measured:
    """What the audit found on the base model and on the trained one, and what the gate decided."""

    base: Sequence[SuiteResult]
    adapter: Sequence[SuiteResult]
    gate: Gate
    after_tuning: AfterTuning | None = None
    agent: AgentRecord | None = None
    engine: AuditEngineRecord | None = None


@dataclass(frozen=True, slots=True)
class GateRecord:
    """The gate's decision and its reasons; `waived`: it was measured, and the adapter is released whatever it found."""

    decision: Decision
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BaseAndAdapter:
    """One figure of the base model and of the trained model; None where nothing was measured."""

    base: float | None = None
    adapter: float | None = None


@dataclass(frozen=True, slots=True)
class AttackSuccess:
    """Attack success over all harmful suites: shares, and the trained model's 95 % interval and counts of replies."""

    base: float | None = None
    adapter: float | None = None
    ci95: tuple[float, ...] = ()  # low, high
    n: int = 0
    n_unscored: int = 0


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """The safe set in the order chosen; every list has one entry for each row.

    `indices` count the safe rows of the pool from 0. `gains` are what each row added to the diversity, None where
    that was not weighed. `coordinates` are the first two principal components of the rows' embeddings.
    """

    indices: tuple[int, ...]
    relevance: tuple[float, ...] = ()
    gains: tuple[float | None, ...] = ()
    rank: int | None = None
    coordinates: tuple[tuple[float, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """The end of an epoch: its numbers in OpenAI's names and what its audit found; `gate` is None without an audit."""

    epoch: int
    step: int
    metrics: Mapping[str, float]
    gate: GateRecord | None = None
    asr: AttackSuccess = field(default_factory=AttackSuccess)
    harmfulness_score: BaseAndAdapter = field(default_factory=BaseAndAdapter)
    over_refusal: BaseAndAdapter = field(default_factory=BaseAndAdapter)
    utility: BaseAndAdapter = field(default_factory=BaseAndAdapter)

    def safety(self) -> dict[str, Any]:
        """Return the JSON of what the audit found."""
        return {name: to_mapping(getattr(self, name)) for name in ("gate", *_SUMMARIES)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """Read the JSON object that `to_mapping` gives."""
        found = {name: read_record(kind, raw.get(name, {})) for name, kind in _SUMMARIES.items()}
        gate = _gate(raw["gate"]) if raw.get("gate") else None
        return cls(raw["epoch"], raw["step"], raw.get("metrics", {}), gate, **found)


_SUMMARIES: Mapping[str, type[Any]] = {
    "asr": AttackSuccess,
    "harmfulness_score": BaseAndAdapter,
    "over_refusal": BaseAndAdapter,
    "utility": BaseAndAdapter,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetyReport:
    """What a run measured and what its figures depend on.

    job_id          of the service; None where a run was made without it
    base_model      the public name of the base model
    recipe          every setting, as in a recipe file
    tau             the bound on each constrained safe loss; empty for methods without one
    trigger_rate    the share of steps after which a safe loss was above its bound; None for methods without one
    validation      losses of `base` and `adapter` on the validation rows; empty without such rows
    seconds         what each stage took
    selected        None where no safe rows are selected
    safe_answers    None where the recipe takes the pool's, whatever they are
    risky_rows      the riskiest first; None where there is no safety pool to compare the rows with
    checkpoints     the ends of the epochs, the first one first; the one that the report is about is `released_step`'s
    ending          None where ends of epochs were not compared: the run ended with the last one
    row_signal      None where the base model was not asked about the rows, or there is no safety pool
    audit_version   how the audit asked and decided (`spard.release.version`); 1 asked plain and mined prompts greedily,
                    and decided on the figures themselves
    replies         how many the audit has asked of `base` and of `adapter`: its cost
    asked           how many of the provider's prompts were asked, and in which ways; what is not asked is not known
    scores          the trained model's replies to attacks by their harmfulness, for each suite and category
    rows_map        None where no safe rows are selected, and in reports of earlier versions, as the next ones are
    lengths         of the rows that were trained on
    after_tuning    what it found after a further clean fine-tuning; the gate decides on the worse. None: it asked once
    agent           what an auditing agent made of the job; None where the policy names none
    transcripts     how many prompts and replies of the audit are kept beside the report; None: none are
    audit_engine    which engine wrote the audit's replies; None in reports of earlier versions: transformers did
    embedder        what safe rows were chosen by; None where none were, and in reports of earlier versions, which
                    compared the base model's states as they are
    memory_plan     how the training was cut to fit its GPUs (`spard.models.fit`); None: it had none, or was not planned
    compute         the operations and the energy of the training; None in reports of earlier versions
    """

    job_id: str | None = None
    base_model: str | None = None
    base_digest: str | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    resolved: Resolved | None = None
    micro_batch_size: int | None = None
    thresholds: GateThresholds | None = None
    data_sha256: Mapping[str, str] = field(default_factory=dict)
    trained_tokens: int | None = None
    steps: int | None = None
    tau: Mapping[str, float] = field(default_factory=dict)
    trigger_rate: float | None = None
    triggered_steps: int | None = None
    validation: Mapping[str, ValidationLoss] = field(default_factory=dict)
    gate: GateRecord
    base: tuple[SuiteResult, ...] = ()
    adapter: tuple[SuiteResult, ...] = ()
    asr: AttackSuccess = field(default_factory=AttackSuccess)
    harmfulness_score: BaseAndAdapter = field(default_factory=BaseAndAdapter)
    over_refusal: BaseAndAdapter = field(default_factory=BaseAndAdapter)
    utility: BaseAndAdapter = field(default_factory=BaseAndAdapter)
    seconds: Mapping[str, float] = field(default_factory=dict)
    selected: SelectedRows | None = None
    risky_rows: tuple[RiskyRow, ...] | None = None
    checkpoints: tuple[CheckpointRecord, ...] = ()
    row_signal: RowSignalRecord | None = None
    safe_answers: SafeAnswers | None = None
    audit_version: int = 1
    replies: Mapping[str, int] = field(default_factory=dict)
    asked: tuple[str, ...] = ()
    scores: tuple[ScoreCounts, ...] = ()
    rows_map: RowsMap | None = None
    lengths: Lengths | None = None
    transcripts: int | None = None
    ending: EndingRecord | None = None
    memory_plan: Mapping[str, bool | int | str | None] | None = None
    after_tuning: AfterTuning | None = None
    agent: AgentRecord | None = None
    audit_engine: AuditEngineRecord | None = None
    embedder: EmbedderRecord | None = None
    compute: ComputeRecord | None = None

    @property
    def released_step(self) -> int | None:
        """The step of the checkpoint that the report is about: the last one unless another was chosen."""
        return self.ending.released_step if self.ending else self.steps

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the file: every field, nested ones too, in their order."""
        values = {each.name: to_mapping(getattr(self, each.name)) for each in fields(self)}
        return values | {"validation": {name: to_mapping(loss) for name, loss in self.validation.items()}}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """Read the JSON object of a file, of this version or an earlier one.

        What a report lacks reads as not measured, and a missing decision as `inconclusive`.
        """
        return cls(
            gate=_gate(raw.get("gate") or {}),
            resolved=optional(Resolved, raw.get("resolved")),
            thresholds=optional(GateThresholds, raw.get("thresholds")),
            validation={name: read_record(ValidationLoss, loss) for name, loss in raw.get("validation", {}).items()},
            base=tuple(read_record(SuiteResult, each) for each in raw.get("base", ())),
            adapter=tuple(read_record(SuiteResult, each) for each in raw.get("adapter", ())),
            **{name: read_record(kind, raw.get(name, {})) for name, kind in _SUMMARIES.items()},
            selected=optional(SelectedRows, raw.get("selected")),
            safe_answers=optional(SafeAnswers, raw.get("safe_answers")),
            risky_rows=_risky_rows(raw.get("risky_rows")),
            checkpoints=tuple(CheckpointRecord.from_json(each) for each in raw.get("checkpoints", ())),
            row_signal=optional(RowSignalRecord, raw.get("row_signal")),
            after_tuning=AfterTuning.from_json(raw.get("after_tuning"), read_record),
            agent=optional(AgentRecord, raw.get("agent")),
            audit_engine=optional(AuditEngineRecord, raw.get("audit_engine")),
            embedder=optional(EmbedderRecord, raw.get("embedder")),
            compute=optional(ComputeRecord, raw.get("compute")),
            tau=_tau(raw.get("tau")),
            asked=tuple(raw.get("asked", ())),
            scores=tuple(read_record(ScoreCounts, each) for each in raw.get("scores", ())),
            rows_map=optional(RowsMap, raw.get("rows_map")),
            lengths=optional(Lengths, raw.get("lengths")),
            ending=EndingRecord.from_json(raw["ending"]) if raw.get("ending") else None,
            **{name: raw[name] for name in _PLAIN if raw.get(name) is not None},
        )


# Fields whose JSON value is the field's own.
_PLAIN = (
    *("job_id", "base_model", "base_digest", "recipe", "micro_batch_size", "data_sha256", "trained_tokens", "steps"),
    *("trigger_rate", "triggered_steps", "seconds", "audit_version", "replies", "transcripts", "memory_plan"),
)


def _gate(raw: Mapping[str, Any]) -> GateRecord:
    return GateRecord(raw.get("decision", "inconclusive"), tuple(raw.get("reasons", ())))


def _tau(raw: Mapping[str, float] | float | None) -> Mapping[str, float]:
    """Read the bounds; reports of early versions have one number, that on the token mean."""
    return {"mean": raw} if isinstance(raw, int | float) else raw or {}


def _risky_rows(raw: Sequence[Mapping[str, Any]] | None) -> tuple[RiskyRow, ...] | None:
    return None if raw is None else tuple(read_record(RiskyRow, each) for each in raw)
