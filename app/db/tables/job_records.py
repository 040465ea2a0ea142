"""Types of the JSON columns of a job beside its spec.

They are mappings that keep unknown keys, because a job may have been written by any version. `run_spec.parse` reads a
recipe.
"""

from __future__ import annotations

from typing import NotRequired, Required

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

_OPEN = ConfigDict(extra="allow")


@with_config(_OPEN)
class DefenseJson(TypedDict):
    """A defense with its settings."""

    type: str


@with_config(_OPEN)
class SelectionJson(TypedDict, total=False):
    """The stored form of `spard.config.Selection`."""

    method: str
    ratio: float
    beta: float
    min_examples: int
    safe_answers: str
    reserve: float
    influence_cap: float
    embedder: str


@with_config(_OPEN)
class LoraJson(TypedDict, total=False):
    """The stored form of `spard.config.Lora`."""

    rank: int
    alpha: float
    dropout: float
    target_modules: list[str] | None


@with_config(_OPEN)
class HyperparametersJson(TypedDict):
    """The stored form of `spard.config.Hyperparameters`: numbers or "auto"."""

    n_epochs: int | str
    batch_size: int | str
    learning_rate_multiplier: float | str


class DpoHyperparametersJson(HyperparametersJson):
    """The hyperparameters of the method `dpo`, with its `beta`."""

    beta: float | str


@with_config(_OPEN)
class DpoJson(TypedDict):
    """The stored form of `spard.config.Dpo`."""

    beta: float | str


@with_config(_OPEN)
class EndingJson(TypedDict, total=False):
    """The stored form of `spard.config.Ending`; after training also the released epoch and why training ended."""

    keep: str
    patience: int | None
    released_epoch: int
    released_step: int
    trained_epochs: int
    planned_epochs: int
    why: str


@with_config(_OPEN)
class RecipeJson(TypedDict):
    """The stored form of `spard.config.Recipe`."""

    defense: DefenseJson
    selection: SelectionJson
    lora: LoraJson | None
    hyperparameters: HyperparametersJson
    audit: dict[str, object]
    seed: int
    max_seq_length: int | None
    learning_rate: float | None
    dpo: NotRequired[DpoJson | None]  # absent for the method supervised
    ending: NotRequired[EndingJson]  # for jobs that compare epochs


class ResolvedJson(TypedDict):
    """The stored form of `spard.config.ResolvedNumbers`: the numbers used for "auto"."""

    n_epochs: int
    batch_size: int
    learning_rate_multiplier: float
    learning_rate: float


@with_config(_OPEN)
class Progress(TypedDict):
    """A job's progress; the steps are training steps."""

    percent: int | float
    step: int | None
    total_steps: int | None
    eta_seconds: int | None
    doing: NotRequired[str]  # within the stage, as "asking 100 attacks at the end of epoch 6 of 10, 40 left"


@with_config(_OPEN)
class JobError(TypedDict):
    """OpenAI's error object."""

    code: str
    message: str
    param: str | None


class LastFailure(TypedDict):
    """The reason and place of a failure; the same failure twice is the job's own fault."""

    reason: str
    phase: str
    step: int | None


class KeptFile(TypedDict):
    """A file of a resume state: its path below the job's folder, and where it is stored."""

    path: str
    key: str
    sha256: str


class ResumeState(TypedDict):
    """The stored resume state; `step` is the training step of the newest one, None before the first."""

    step: int | None
    files: list[KeptFile]


class Adapter(TypedDict):
    """The archive of a released adapter."""

    storage_key: str
    sha256: str
    bytes: int


class HeldArchive(Adapter):
    """The archive of an adapter that is kept because a waiver may release it."""

    manifest_sha256: str


class AuditRow(TypedDict):
    """The columns of `AuditResult` except the job's id."""

    suite: str
    subject: str  # base | adapter
    kind: str
    judge: str
    n: int
    n_unscored: int
    hits: int
    rate: NotRequired[float | None]
    ci_low: NotRequired[float | None]
    ci_high: NotRequired[float | None]
    mean_harmfulness: NotRequired[float | None]


@with_config(_OPEN)
class BaseAndAdapterJson(TypedDict, total=False):
    """One figure for the base model and the adapter; None if it was not measured."""

    base: float | None
    adapter: float | None


@with_config(_OPEN)
class AttackSuccessJson(BaseAndAdapterJson, total=False):
    """Attack success rates, with the adapter's 95 % interval and counts of replies."""

    ci95: list[float]
    n: int
    n_unscored: int


@with_config(_OPEN)
class FindingJson(TypedDict, total=False):
    """A reason of the gate as data; `hits` and the later keys are only set if a threshold bounds the figure."""

    reason: Required[str]
    finding: Required[str]
    suite: str | None
    kind: str | None
    judge: str | None
    asked: int | None
    planned: int | None
    after_tuning: bool
    category: str | None
    hits: int
    n: int
    share: float
    base_share: float | None
    measure: str
    value: float
    low: float
    high: float
    limit: float
    demand: str
    prompts: int | None
    is_open: bool


@with_config(_OPEN)
class GateJson(TypedDict):
    """The gate's decision: pass, fail, inconclusive or waived."""

    decision: str
    reasons: NotRequired[list[str]]
    findings: NotRequired[list[FindingJson] | None]  # missing in audits of earlier releases


@with_config(_OPEN)
class CheckpointSafety(TypedDict):
    """The audit results of a checkpoint, and whether it is released."""

    gate: GateJson
    asr: AttackSuccessJson
    harmfulness_score: BaseAndAdapterJson
    over_refusal: BaseAndAdapterJson
    utility: BaseAndAdapterJson
    audit_version: NotRequired[int]  # missing in audits of earlier releases


@with_config(_OPEN)
class KeyName(TypedDict):
    """A key with its name and owner."""

    key_id: str
    name: str | None
    owner: str | None


@with_config(_OPEN)
class WaiverFacts(TypedDict):
    """The content of a waiver that two people signed; times are Unix seconds."""

    waiver_id: str
    job_id: str
    manifest_sha256: str
    archive_sha256: str
    decision: str
    reason: str
    proposed_by: KeyName
    approved_by: KeyName
    proposed_at: int
    approved_at: int | None
    expires_at: int


@with_config(_OPEN)
class TokenLossJson(TypedDict):
    """The stored form of `spard.release.figures.ValidationLoss`."""

    loss: float
    accuracy: float
    tokens: int


@with_config(_OPEN)
class TaskCheckJson(TypedDict):
    """The stored form of `spard.release.task_check.TaskCheck`: both models' losses, and the result as a sentence."""

    source: str
    rows: int
    replies: int
    is_pairs: bool
    is_unfamiliar: NotRequired[bool]  # the base model has not read such text; not in records of earlier versions
    why_none: str
    base: TokenLossJson | None
    adapter: TokenLossJson | None
    words: str


@with_config(_OPEN)
class EvidenceJson(TypedDict):
    """The stored form of `spard.release.records.EvidenceRecord`, and the evidence as a sentence."""

    comparable: str
    steps: int
    shift_ratio: float | None
    harmful_shift: float | None
    benign_shift: float | None
    harmful_prompts: int
    benign_prompts: int
    references: int
    p_value: float | None
    why_none: str
    words: str


class SafetySummary(TypedDict, total=False):
    """The part of the safety report that the job object shows."""

    asr: AttackSuccessJson
    harmfulness_score: BaseAndAdapterJson
    over_refusal: BaseAndAdapterJson
    utility: BaseAndAdapterJson
    trigger_rate: float | None
    gate: GateJson
    audit_version: int  # missing in audits of version 1
    seconds: dict[str, float]
    waiver: WaiverFacts
    ending: EndingJson  # for jobs that compare epochs
    task_check: TaskCheckJson  # for jobs that measured if their task was learned
    evidence: EvidenceJson  # for jobs with an undefended probe of their rows
