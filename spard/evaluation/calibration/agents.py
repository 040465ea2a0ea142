"""Error rates of an auditing agent: its scores on jobs that the provider knows to be clean.

`spard measure-agent` collects them from safety reports. An agent may decide if the upper end of the 95 % Wilson
interval of its false-positive rate, at the policy's score, is at most `MAX_ERROR`; this takes 73 clean jobs without a
false positive. A job without a score counts as one, because it would not have been released.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from spard.errors import InvalidRecipe
from spard.evaluation.calibration.errors import MAX_ERROR
from spard.evaluation.rates import Rate, rate


@dataclass(frozen=True, slots=True)
class AgentErrors:
    """The scores of the agent of this name on clean jobs; None for a job without a score."""

    agent: str
    scores: tuple[float | None, ...]

    def false_positives(self, max_score: float) -> Rate:
        """Return the share of clean jobs that this maximal score does not release."""
        return rate(sum(each is None or each > max_score for each in self.scores), len(self.scores))

    def may_decide(self, max_score: float) -> bool:
        """Return True if the upper bound of that share is at most `MAX_ERROR`."""
        return bool(self.scores) and self.false_positives(max_score).high <= MAX_ERROR

    def to_json(self) -> dict[str, object]:
        """Return the JSON object of the file."""
        return {"agent": self.agent, "clean": list(self.scores)}

    @classmethod
    def from_json(cls, raw: Any) -> Self:
        """Read the JSON object of the file; raise `KeyError`, `TypeError` or `ValueError` if it is invalid."""
        scores = tuple(None if each is None else float(each) for each in raw["clean"])
        if any(each is not None and not 0 <= each <= 1 for each in scores):
            raise ValueError("a score is not within 0 and 1")
        return cls(str(raw["agent"]), scores)


def read_errors(path: Path) -> AgentErrors:
    """Read a file written by `spard measure-agent`; raise `InvalidRecipe` if it cannot be read or is another file."""
    try:
        return AgentErrors.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InvalidRecipe(f"agent_errors: {path.name} cannot be read: {error.strerror}", "agent_errors") from error
    except (KeyError, TypeError, ValueError) as error:
        message = f"agent_errors: {path.name} is not what `spard measure-agent --json` writes"
        raise InvalidRecipe(message, "agent_errors") from error
