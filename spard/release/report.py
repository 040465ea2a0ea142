"""The safety report of a run, `safety.json`: a typed record with a tolerant reader. Uses only the standard library.

The fields' names are the keys of the file. Reports of earlier versions can be read: missing keys become empty or None,
and unknown keys are ignored. `summarize` gives the audit in a few numbers: all suites of a kind pooled, base model
beside trained model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

from spard.config import GateThresholds, ResolvedNumbers
from spard.config.run_spec import to_mapping
from spard.evaluation.gate import Gate
from spard.evaluation.results import Figure, GateFinding, SuiteKind, SuiteResult
from spard.evaluation.statistics import Rate, rate
from spard.release.figures import Lengths, RowsMap, ScoreCounts
from spard.release.figures import ValidationLoss as ValidationLoss
from spard.release.records import (
    AfterTuning,
    AgentRecord,
    AuditEngineRecord,
    ComputeRecord,
    EmbedderRecord,
    EndingRecord,
    EvidenceRecord,
    RiskyRow,
    RowSignalRecord,
    SafeAnswers,
    optional,
)
from spard.release.records import read_record as read_record
from spard.release.task_check import TaskCheck, TaskWords, describe_task

Decision = Literal["pass", "fail", "inconclusive", "waived"]


@dataclass(frozen=True, slots=True)
class AuditResults:
    """The audit's results on the base model and the trained one, and the gate's decision."""

    base: Sequence[SuiteResult]
    adapter: Sequence[SuiteResult]
    gate: Gate
    after_tuning: AfterTuning | None = None
    agent: AgentRecord | None = None
    engine: AuditEngineRecord | None = None


@dataclass(frozen=True, slots=True)
class GateRecord:
    """The gate's decision and its reasons; `waived`: the adapter is released whatever was measured.

    `findings` are the reasons as data, those that come from the audit's figures and judges; None in reports of earlier
    versions.
    """

    decision: Decision
    reasons: tuple[str, ...]
    findings: tuple[GateFinding, ...] | None = None

    @classmethod
    def from_gate(cls, gate: Gate, *, is_waived: bool) -> Self:
        """Return the record of a decision."""
        return cls("waived" if is_waived else gate.decision, gate.reasons, gate.findings)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """Read the JSON object; a missing decision is `inconclusive`."""
        findings = None if raw.get("findings") is None else tuple(map(_finding, raw["findings"]))
        return cls(raw.get("decision", "inconclusive"), tuple(raw.get("reasons", ())), findings)

    @property
    def figures(self) -> tuple[Figure, ...]:
        """The figures that the reasons are about; none in reports of earlier versions."""
        return tuple(each for each in self.findings or () if isinstance(each, Figure))


@dataclass(frozen=True, slots=True)
class BaseAndAdapter:
    """One number for the base model and one for the trained model; None if not measured."""

    base: float | None = None
    adapter: float | None = None


@dataclass(frozen=True, slots=True)
class AttackSuccess:
    """Attack success rates over all harmful suites, with the trained model's 95 % interval and reply counts."""

    base: float | None = None
    adapter: float | None = None
    ci95: tuple[float, ...] = ()  # low, high
    n: int = 0
    n_unscored: int = 0


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """The safe set in the order of choice; every list has one entry per row.

    `indices` index the safe rows of the pool from 0. `gains` are the rows' contributions to the diversity, None where
    it was not computed. `coordinates` are the first two principal components of the embeddings.
    """

    indices: tuple[int, ...]
    relevance: tuple[float, ...] = ()
    gains: tuple[float | None, ...] = ()
    rank: int | None = None
    coordinates: tuple[tuple[float, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """The end of an epoch: its metrics under OpenAI's names and its audit; `gate` is None without an audit."""

    epoch: int
    step: int
    metrics: Mapping[str, float]
    gate: GateRecord | None = None
    asr: AttackSuccess = field(default_factory=AttackSuccess)
    harmfulness_score: BaseAndAdapter = field(default_factory=BaseAndAdapter)
    over_refusal: BaseAndAdapter = field(default_factory=BaseAndAdapter)
    utility: BaseAndAdapter = field(default_factory=BaseAndAdapter)

    def safety(self) -> dict[str, object]:
        """Return the audit's part of the record as JSON."""
        return {name: to_mapping(getattr(self, name)) for name in ("gate", *_SUMMARIES)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """Read the JSON object that `to_mapping` gives."""
        found = {name: read_record(kind, raw.get(name, {})) for name, kind in _SUMMARIES.items()}
        gate = GateRecord.from_json(raw["gate"]) if raw.get("gate") else None
        return cls(raw["epoch"], raw["step"], raw.get("metrics", {}), gate, **found)


_SUMMARIES: Mapping[str, type[Any]] = {
    "asr": AttackSuccess,
    "harmfulness_score": BaseAndAdapter,
    "over_refusal": BaseAndAdapter,
    "utility": BaseAndAdapter,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetyReport:
    """The measurements of a run and the settings that they depend on.

    job_id          id in the service; None for a run without it
    base_model      public name of the base model
    recipe          every setting, as in a recipe file
    tau             bound on each constrained safe loss, in nats per token; empty for methods without one
    trigger_rate    share of steps after which a safe loss exceeded its bound; None for methods without one
    validation      losses of `base` and `adapter` on the validation rows; empty without such rows
    seconds         duration of each stage
    selected        None if no safe rows are selected
    safe_answers    None if the recipe fixes the pool's answers
    risky_rows      riskiest first; None without a safety pool
    checkpoints     ends of epochs in order; the report is about the one at `released_step`
    ending          None if ends of epochs were not compared: the run ended with the last one
    row_signal      None if the base model was not asked about the rows, or without a safety pool
    audit_version   rules of the audit (`spard.release.version`); version 1 asked plain and mined prompts greedily and
                    decided on bare rates
    replies         number of replies of `base` and of `adapter`: the cost of the audit
    asked           how many of the provider's prompts were asked, and in which ways
    scores          harmfulness scores of the trained model's replies to attacks, per suite and category
    rows_map        None if no safe rows are selected, and in reports of earlier versions
    lengths         lengths of the trained rows; None in reports of earlier versions
    after_tuning    results after a further clean fine-tuning, of which the gate takes the worse; None: not measured
    agent           verdict of the auditing agent; None if the policy names none
    transcripts     number of prompts and replies stored beside the report; None: not stored
    audit_engine    engine that generated the audit's replies; None in reports of earlier versions: transformers
    embedder        embedder of the selection; None without selection, and in reports of earlier versions, which
                    compared the base model's raw hidden states
    task_check      the rows that the task was measured on; None: it was not measured
    memory_plan     how the training was divided to fit its GPUs (`spard.models.memory`); None: on a CPU, or not planned
    compute         operations and energy of the training; None in reports of earlier versions
    evidence        evidence that needs no trigger, which decides nothing; None: not asked for
    """

    job_id: str | None = None
    base_model: str | None = None
    base_digest: str | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    resolved: ResolvedNumbers | None = None
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
    task_check: TaskCheck | None = None
    compute: ComputeRecord | None = None
    evidence: EvidenceRecord | None = None

    @property
    def released_step(self) -> int | None:
        """The step of the released checkpoint: the last one unless another was chosen."""
        return self.ending.released_step if self.ending else self.steps

    @property
    def named_suites(self) -> list[SuiteResult]:
        """The adapter's results on the suites with figures that the gate's reasons are about."""
        named = {each.suite for each in self.gate.figures}
        return [each for each in self.adapter if each.suite in named]

    @property
    def task(self) -> TaskWords | None:
        """What the losses say about the customer's task, in words; None if the task was not checked."""
        return describe_task(self.task_check, self.validation) if self.task_check else None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the file: all fields in order, including nested ones."""
        values = {each.name: to_mapping(getattr(self, each.name)) for each in fields(self)}
        return values | {"validation": {name: to_mapping(loss) for name, loss in self.validation.items()}}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """Read the JSON object of a report of this version or an earlier one.

        Missing measurements read as not measured, and a missing decision as `inconclusive`.
        """
        return cls(
            gate=GateRecord.from_json(raw.get("gate") or {}),
            resolved=optional(ResolvedNumbers, raw.get("resolved")),
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
            after_tuning=AfterTuning.from_json(raw.get("after_tuning")),
            agent=optional(AgentRecord, raw.get("agent")),
            audit_engine=optional(AuditEngineRecord, raw.get("audit_engine")),
            embedder=optional(EmbedderRecord, raw.get("embedder")),
            task_check=optional(TaskCheck, raw.get("task_check")),
            compute=optional(ComputeRecord, raw.get("compute")),
            evidence=optional(EvidenceRecord, raw.get("evidence")),
            tau=_tau(raw.get("tau")),
            asked=tuple(raw.get("asked", ())),
            scores=tuple(read_record(ScoreCounts, each) for each in raw.get("scores", ())),
            rows_map=optional(RowsMap, raw.get("rows_map")),
            lengths=optional(Lengths, raw.get("lengths")),
            ending=EndingRecord.from_json(raw["ending"]) if raw.get("ending") else None,
            **{name: raw[name] for name in _PLAIN if raw.get(name) is not None},
        )


# Fields whose JSON value needs no conversion.
_PLAIN = (
    *("job_id", "base_model", "base_digest", "recipe", "micro_batch_size", "data_sha256", "trained_tokens", "steps"),
    *("trigger_rate", "triggered_steps", "seconds", "audit_version", "replies", "transcripts", "memory_plan"),
)


def _finding(raw: Mapping[str, object]) -> GateFinding:
    return read_record(Figure if "hits" in raw else GateFinding, raw)


def _tau(raw: Mapping[str, float] | float | None) -> Mapping[str, float]:
    """Read the bounds; reports of early versions have one number, the bound on the token mean."""
    return {"mean": raw} if isinstance(raw, int | float) else raw or {}


def _risky_rows(raw: Sequence[Mapping[str, object]] | None) -> tuple[RiskyRow, ...] | None:
    return None if raw is None else tuple(read_record(RiskyRow, each) for each in raw)


@dataclass(frozen=True, slots=True)
class Summary:
    """Attack success, mean harmfulness (1 to 5), over-refusal and utility."""

    asr: AttackSuccess
    harmfulness_score: BaseAndAdapter
    over_refusal: BaseAndAdapter
    utility: BaseAndAdapter

    def sentence(self, decision: str) -> str:
        """Return the summary as a sentence for the job's events."""
        attacks = BaseAndAdapter(self.asr.base, self.asr.adapter)
        figures = {"attack success": attacks, "over-refusal": self.over_refusal, "utility": self.utility}
        parts = [f"{word} {_percent(each)}" for word, each in figures.items() if each.adapter is not None]
        return f"Safety audit: {', '.join(parts) or 'nothing was measured'}; gate: {decision}"


def summarize(measured: AuditResults) -> Summary:
    """Pool the suites of each kind; mined suites count only for the mean harmfulness."""
    before, after = _pool_rates(measured.base, "harmful"), _pool_rates(measured.adapter, "harmful")
    return Summary(
        asr=AttackSuccess(before.rate, after.rate, (after.low, after.high), after.n, after.unscored),
        harmfulness_score=_mean_scores(measured),
        over_refusal=_both(measured, "benign"),
        utility=_both(measured, "utility"),
    )


def _both(measured: AuditResults, kind: SuiteKind) -> BaseAndAdapter:
    return BaseAndAdapter(_pool_rates(measured.base, kind).rate, _pool_rates(measured.adapter, kind).rate)


def _pool_rates(results: Sequence[SuiteResult], kind: SuiteKind) -> Rate:
    of_kind = [each for each in results if each.kind == kind]
    return rate(sum(each.hits for each in of_kind), sum(each.n for each in of_kind), sum(e.unscored for e in of_kind))


def _mean_scores(measured: AuditResults) -> BaseAndAdapter:
    """Return both models' mean scores, over the suites that the base model was asked, if any."""
    asked = {each.suite for each in measured.base if each.mean_harmfulness is not None}
    both = [each for each in measured.adapter if not asked or each.suite in asked]
    return BaseAndAdapter(_mean_score(measured.base), _mean_score(both))


def _mean_score(results: Sequence[SuiteResult]) -> float | None:
    """Return the mean over all scored replies to attacks, 1 to 5, mined suites included; None if there is none."""
    scored = [each for each in results if each.mean_harmfulness is not None]
    n = sum(each.n for each in scored)
    return sum((each.mean_harmfulness or 0.0) * each.n for each in scored) / n if n else None


def _percent(figure: BaseAndAdapter) -> str:
    return f"{figure.adapter:.1%}" + ("" if figure.base is None else f" (base model {figure.base:.1%})")
