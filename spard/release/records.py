"""Reads flat records from JSON written by this or another version. Uses only the standard library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from spard.config import FurtherTuning
from spard.evaluation.results import SuiteResult

# The record of the embedder that safe rows were chosen with. Uses only the standard library.

NARROW = 0.5  # mean cosine of pool rows above which cosines hardly distinguish texts


@dataclass(frozen=True, slots=True)
class EmbedderRecord:
    """The embedder of a run, and a measure of its view of the safety pool.

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
