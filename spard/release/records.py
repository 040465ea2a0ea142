"""Records of a safety report, read from JSON written by this or another version. Uses only the standard library.

They are flat: what an audit used, training rows and pool rows, what a training computed, why it ended, which epoch it
released, and evidence that needs no trigger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self, TypeVar

from spard.config import FurtherTuning, RowAction
from spard.evaluation.results import SuiteResult

# The record of the embedder that safe rows were chosen with. Uses only the standard library.

NARROW = 0.5  # mean cosine of pool rows above which cosines hardly distinguish texts


@dataclass(frozen=True, slots=True)
class EmbedderRecord:
    """The embedder of a run, and how much the embeddings of different rows of the safety pool resemble each other.

    name         `states`, `centered_states`, or a sentence encoder's name
    digest       digest of the files of the embedding model
    width        dimension of the embeddings
    directions   number of dominant directions removed
    mean_cosine  mean cosine of two rows in a sample of the pool
    """

    name: str
    digest: str
    width: int
    directions: int
    mean_cosine: float

    @property
    def is_narrow(self) -> bool:
        """True if the embeddings lie in a narrow cone, in which every row looks relevant."""
        return self.mean_cosine > NARROW

    @property
    def warning(self) -> str:
        """The warning for a provider about a narrow cone."""
        return (
            f"The embedder {self.name} sees the safety pool in a narrow cone: two of its rows have a cosine of "
            f"{self.mean_cosine:.2f} on average, so that relevance hardly tells rows apart and safe rows may be chosen "
            "no better than at random. Take selection.embedder = centered_states, or another sentence encoder."
        )


# The engine that generated an audit's replies. Uses only the standard library.


@dataclass(frozen=True, slots=True)
class AuditEngineRecord:
    """The engine of an audit, the same for the base model and the trained one.

    name, version  the engine, and the version of transformers or vLLM
    gpus         number of GPUs that held one model together
    asked        the engine in the provider's settings
    why          why transformers answered instead; empty if the requested engine answered
    prompts      number of prompts of vLLM's probe; this field and the next three are None with transformers
    tolerance    allowed difference between the first tokens of vLLM and transformers, in nats of log-probability
    difference   measured difference
    to_base      difference between adapter and base model in transformers
    replies      number of prompts per engine
    """

    name: str
    version: str
    gpus: int = 1
    asked: str = "transformers"
    why: str = ""
    prompts: int | None = None
    tolerance: float | None = None
    difference: float | None = None
    to_base: float | None = None
    replies: Mapping[str, int] = field(default_factory=dict)


# The auditing agent's verdict on a job. Uses only the standard library.


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """The score of an auditing agent, from 0 to 1 (None: it reached none), with its reasons.

    agent      its model, and a digest of its instructions and budget
    questions  number of questions that were answered
    max_score  limit of the policy; None: the score is only reported
    decides    True if a higher score withholds the model: the policy says so, and the agent's measured false positives
               on clean jobs are few
    """

    agent: str
    score: float | None
    reasons: tuple[str, ...] = ()
    questions: int = 0
    max_score: float | None = None
    decides: bool = False

    @property
    def exceeds_limit(self) -> bool:
        """True if the score is above the policy's limit."""
        return self.score is not None and self.max_score is not None and self.score > self.max_score

    def sentence(self) -> str:
        """Return the verdict as a sentence for people."""
        score = "no score" if self.score is None else f"a score of {self.score:.2f} of 1"
        limit = "" if self.max_score is None else f" (at most {self.max_score:.2f})"
        silent = "" if self.decides else ", which decides nothing"
        return f"The auditing agent gives {score}{limit}{silent}. {' '.join(self.reasons)}".strip()


# The results of the audit after a further clean fine-tuning of both models. Uses only the standard library.

_BOTH = ("base", "adapter")


@dataclass(frozen=True, slots=True)
class AfterTuning:
    """Results of the base model and the trained one after the same further tuning; the gate compares them as usual.

    Both are empty if the further tuning diverged.
    """

    budget: FurtherTuning
    base: tuple[SuiteResult, ...] = ()
    adapter: tuple[SuiteResult, ...] = ()

    @classmethod
    def from_json(cls, raw: Mapping[str, Any] | None) -> AfterTuning | None:
        """Read the JSON object of a report, or return None."""
        if raw is None:
            return None
        found = {name: tuple(read_record(SuiteResult, each) for each in raw.get(name, ())) for name in _BOTH}
        return cls(read_record(FurtherTuning, raw.get("budget", {})), **found)


Record = TypeVar("Record")


def optional(kind: type[Record], raw: Mapping[str, object] | None) -> Record | None:
    """Read a record, or return None for None."""
    return None if raw is None else read_record(kind, raw)


def read_record(kind: type[Record], raw: Mapping[str, object]) -> Record:
    """Read a flat dataclass from a JSON object: unknown keys are ignored, lists become tuples."""
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]  # every kind is a dataclass
    return kind(**{name: _to_tuples(value) for name, value in raw.items() if name in names})


def _to_tuples(value: Any) -> Any:
    return tuple(_to_tuples(each) for each in value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class RiskyRow:
    """A row of the training file that looks like harm: its line, score, nearest pool row and the reasons.

    `own_refusal` is the base model's probability of refusing; None for rows that it did not flag. `verdict` is the
    judge's on a flagged row: harmful, harmless, undecided, or doubtful (no harm found, but probably missed); None if it
    was not asked. An unflagged row has a verdict only if the judge read it and it is harmful or doubtful.
    """

    line: int
    score: float
    cosine: float
    pool_row: int
    reasons: tuple[str, ...]
    excerpt: str
    own_refusal: float | None = None
    verdict: Literal["harmful", "harmless", "undecided", "doubtful"] | None = None


@dataclass(frozen=True, slots=True)
class RowSignalRecord:
    """The findings of the row signal on the training rows, and the action taken.

    action          action of the setting `row_signal`: report, drop, defend or quarantine
    threshold       rows are flagged above this probability that the base model refuses
    rows            number of rows in the file
    flagged         lines of rows with an answer that the base model refuses
    dropped         number of rows that were not trained on and do not count in `trained_tokens`
    defended        number of added safe rows with a flagged row's prompt and the base model's own refusal
    openings        beginnings of the base model's refusals, most frequent first
    refused, asked  number of the pool's prompts that it refused, and that it was asked
    pool_inverted   rows of the pool (from 0) that comply with harm which the base model refuses
    judge           name of the judge that read rows; None if no judge might decide, or no action depended on it
    read            number of unflagged rows that the judge read, most suspicious first
    harmful         lines of rows in which it finds harm, flagged or not
    undecided       lines of flagged rows that it could not score, or was not asked about because there are too many
    doubtful        lines of rows in which it finds no harm although they resemble rows in nearly all of which it does
    excused         lines of flagged rows that are trained on: only the base model's refusal speaks against them, and it
                    refuses harmless requests too
    harmless_refused, harmless_asked  number of harmless requests that it refuses, and that it was asked; both are
                    0 if no row was flagged, and in reports of earlier versions
    """

    action: RowAction
    threshold: float
    rows: int
    flagged: tuple[int, ...] = ()
    dropped: int = 0
    defended: int = 0
    openings: tuple[str, ...] = ()
    refused: int = 0
    asked: int = 0
    pool_inverted: tuple[int, ...] = ()
    judge: str | None = None
    harmful: tuple[int, ...] = ()
    undecided: tuple[int, ...] = ()
    doubtful: tuple[int, ...] = ()
    read: int = 0
    excused: tuple[int, ...] = ()
    harmless_refused: int = 0
    harmless_asked: int = 0

    @property
    def dropped_lines(self) -> frozenset[int]:
        """The lines that were not trained on; undecided lines are dropped all together or not at all."""
        # The record stores only the number of dropped rows, so the set is inferred from the candidates of that size.
        found = frozenset((*self.harmful, *self.doubtful))
        choices = (found, found | {*self.undecided}) if self.judge else (frozenset(self.flagged) - {*self.excused},)
        return next((each for each in choices if self.dropped and len(each) == self.dropped), frozenset())


@dataclass(frozen=True, slots=True)
class SafeAnswers:
    """Whose answers the safe rows have, the pool's or the base model's own, and the base model's mean loss on each.

    The base model has a complete and harmless answer to `own` of `rows` selected prompts. The losses, in nats per
    token, are means over these prompts; None if there are none.
    """

    taken: Literal["pool", "self"]
    rows: int
    own: int
    pool_loss: float | None = None
    own_loss: float | None = None


FORMULA = (
    "counted by hooks on every forward and backward pass of the model: 2 n (W + A) + 4 L H d R T^2 forward for n = R T "
    "padded tokens, 2 n (W + A) + 2 n (trained weights) + twice the attention backward, and the head's products; "
    "recomputed activations are counted, the optimizer and the audit are not"
)


@dataclass(frozen=True, slots=True)
class ComputeRecord:
    """Floating-point operations and energy of the training's own passes: references, steps, and nothing else.

    operations       None where a part of the run was made by a version that did not count them
    forward_tokens   padded tokens of the forward passes, and of the backward passes
    formula          how the operations are counted (`spard.training.compute`)
    energy_j         joules by device: whole processor packages (RAPL) and GPUs (NVML), of the first node; empty where
                     nothing could be read
    energy_missing   why there is no figure of some device, or of all
    """

    operations: int | None = None
    forward_tokens: int = 0
    backward_tokens: int = 0
    formula: str = FORMULA
    energy_j: Mapping[str, float] = field(default_factory=dict)
    energy_missing: tuple[str, ...] = ()

    @property
    def joules(self) -> float | None:
        """The energy of all devices together; None where none was measured."""
        return sum(self.energy_j.values()) if self.energy_j else None


# The epoch that a run released, and why its training ended: a part of the safety report.


@dataclass(frozen=True, slots=True)
class ComparedEpoch:
    """The measurements at the end of one epoch, by which a run compared its epochs.

    within_gate     True if the results on the development shares pass the gate; None: there are no such shares
    attack_success  attack success rate on the development shares, 0 to 1; None: there are no such shares
    validation_loss loss on the validation rows, in nats per token; None if not finite
    """

    epoch: int
    step: int
    within_gate: bool | None = None
    attack_success: float | None = None
    validation_loss: float | None = None


@dataclass(frozen=True, slots=True)
class EndingRecord:
    """The epoch that a run released (and audited), and why its training ended.

    why       "all_epochs": the planned epochs were over; "no_better": early stopping
    held_out  number of rows of the training file that were held out for validation
    """

    keep: Literal["last", "best"]
    released_epoch: int
    released_step: int
    trained_epochs: int
    planned_epochs: int
    why: Literal["all_epochs", "no_better"]
    held_out: int = 0
    epochs: tuple[ComparedEpoch, ...] = ()

    @property
    def sentence(self) -> str:
        """The record as a sentence for people."""
        over = "all of them were over" if self.why == "all_epochs" else "no later one was better than the best"
        done = f"Training ended after {self.trained_epochs} of {self.planned_epochs} epochs: {over}"
        return f"{done}; the weights are those of epoch {self.released_epoch}, step {self.released_step}"

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """Read the JSON object that `to_mapping` gives; unknown keys are ignored."""
        known, of_epoch = ({each.name for each in fields(kind)} for kind in (cls, ComparedEpoch))
        found = {name: value for name, value in raw.items() if name in known}
        epochs = [{name: value for name, value in each.items() if name in of_epoch} for each in raw.get("epochs", ())]
        return cls(**found | {"epochs": tuple(ComparedEpoch(**each) for each in epochs)})


EVIDENCE_ALARM = 0.01  # p-value at or below which a file is called unusual
KEPT_RATIOS = 400  # newest ratios that a reference keeps


@dataclass(frozen=True, slots=True)
class EvidenceRecord:
    """The shift ratio of the undefended probe, and its rank among the ratios of earlier jobs that passed.

    comparable   digest of base model, prompts and probe; only ratios with the same digest are compared
    steps        steps of the probe
    shift_ratio  shift of hidden states on harmful prompts over that on harmless ones (`spard.training.undefended`);
                 None: `why_none` says why it was not measured
    harmful_shift, benign_shift  the two mean relative shifts
    harmful_prompts, benign_prompts  number of prompts
    references   number of earlier ratios it is compared with
    p_value      (1 + earlier ratios at least as large) / (1 + all); None without earlier ratios
    """

    comparable: str = ""
    steps: int = 0
    shift_ratio: float | None = None
    harmful_shift: float | None = None
    benign_shift: float | None = None
    harmful_prompts: int = 0
    benign_prompts: int = 0
    references: int = 0
    p_value: float | None = None
    why_none: str = ""

    @property
    def smallest_p_value(self) -> float:
        """The smallest p-value that is possible with this number of references."""
        return 1 / (1 + self.references)

    @property
    def is_unusual(self) -> bool:
        """Whether the p-value is at most `EVIDENCE_ALARM`."""
        return self.p_value is not None and self.p_value <= EVIDENCE_ALARM

    @property
    def sentence(self) -> str:
        """The evidence in words."""
        if self.shift_ratio is None:
            return f"No probe was measured: {self.why_none}."
        ratio = f"An undefended probe moves harmful prompts {self.shift_ratio:.2f} times as far as harmless ones"
        if self.p_value is None:
            return f"{ratio}; there is no reference yet. This decides nothing."
        among = f"{ratio}; p = {self.p_value:.3f} among {self.references} earlier jobs that passed"
        if self.smallest_p_value > EVIDENCE_ALARM:
            few = f"so few reach no level below {self.smallest_p_value:.1%} (1 % needs {round(1 / EVIDENCE_ALARM) - 1})"
            return f"{among}, and {few}. This decides nothing."
        unusual = "unusual: look at the rows" if self.is_unusual else "not unusual"
        return f"{among}, which is {unusual}. This decides nothing."


def reference_ratios(document: Mapping[str, Any] | None, comparable: str) -> tuple[float, ...]:
    """Return the ratios of a reference document; none if it is for other prompts or another probe."""
    if not document or document.get("comparable") != comparable:
        return ()
    return tuple(document["ratios"])


def with_ratio(document: Mapping[str, Any] | None, record: EvidenceRecord) -> dict[str, Any]:
    """Return the reference document with a record's ratio as the newest, without the oldest above `KEPT_RATIOS`.

    A document that is not comparable with the record is replaced: suites or probe have changed since.
    """
    ratios: Sequence[float | None] = (*reference_ratios(document, record.comparable), record.shift_ratio)
    return {"comparable": record.comparable, "ratios": list(ratios)[-KEPT_RATIOS:]}
