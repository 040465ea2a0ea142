"""The auditing agent's verdict on a job. Uses only the standard library."""

from __future__ import annotations

from dataclasses import dataclass


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
