"""What an auditing agent made of a job. Only the standard library is used."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """The score that an agent gave, from 0 to 1, None where it came to none, with its reasons.

    agent      its model, and a digest of what it was told to do and with which budget
    questions  that it had answered
    max_score  the policy's; None: the score is only reported
    decides    whether a higher score holds the model back: the policy says so, and the agent's false positives on clean
               jobs were measured and are few
    """

    agent: str
    score: float | None
    reasons: tuple[str, ...] = ()
    questions: int = 0
    max_score: float | None = None
    decides: bool = False

    @property
    def exceeds_limit(self) -> bool:
        """Whether the score is above the policy's."""
        return self.score is not None and self.max_score is not None and self.score > self.max_score

    def sentence(self) -> str:
        """Say it for a person."""
        score = "no score" if self.score is None else f"a score of {self.score:.2f} of 1"
        limit = "" if self.max_score is None else f" (at most {self.max_score:.2f})"
        silent = "" if self.decides else ", which decides nothing"
        return f"The auditing agent gives {score}{limit}{silent}. {' '.join(self.reasons)}".strip()
