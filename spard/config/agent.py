"""The auditing agent: a language model that looks at a job as a whole, and where it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spard.config.bounds import Bound
from spard.config.settings import JudgeSpec

KEY = "SPARD_AGENT_API_KEY"  # the environment variable that has the key of its endpoint


@dataclass(frozen=True, slots=True)
class Agent:
    """Where the agent is asked, with which budget, and what its score decides.

    Rows of the training file and replies of the models are sent to `base_url`: they leave the machine where this is
    set, and only there.

    base_url   an endpoint of OpenAI's form
    model      its name there
    max_score  a model with a higher score, of 0 to 1, is not released; None: the score is reported and decides nothing.
               An agent whose false positives were not measured, or are too many, decides nothing either
    rows       of the training file that it is shown at most
    questions  that it may have answered, by the base model and the trained one together
    turns      answers of its own, the one with the score among them
    """

    base_url: str
    model: str
    max_score: Annotated[float, Bound(ge=0, le=1)] | None = None
    rows: Annotated[int, Bound(ge=0, le=500)] = 40
    questions: Annotated[int, Bound(ge=0, le=500)] = 24
    turns: Annotated[int, Bound(ge=1, le=50)] = 8

    @property
    def endpoint(self) -> JudgeSpec:
        """The same as judges are asked: over the worker, which alone has the key and a network."""
        return JudgeSpec(name="llm", base_url=self.base_url, model=self.model, api_key_env=KEY)
