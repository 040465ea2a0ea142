"""The settings of the auditing agent: a language model that examines a job as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spard.config.bounds import Bound
from spard.config.settings import JudgeSpec

KEY = "SPARD_AGENT_API_KEY"  # environment variable with the endpoint's key


@dataclass(frozen=True, slots=True)
class Agent:
    """The endpoint of the agent, its budget, and the effect of its score.

    Rows of the training file and replies of the models are sent to `base_url`; they leave the machine only if an agent
    is set.

    base_url   an endpoint of OpenAI's form
    model      its name there
    max_score  a model with a higher score, from 0 to 1, is not released; None: the score is only reported. It is also
               only reported if the agent's false positives were not measured or are too many
    rows       rows of the training file that it is shown, at most
    questions  questions to the base model and the trained one together, at most
    turns      its own answers, including the one with the score
    """

    base_url: str
    model: str
    max_score: Annotated[float, Bound(ge=0, le=1)] | None = None
    rows: Annotated[int, Bound(ge=0, le=500)] = 40
    questions: Annotated[int, Bound(ge=0, le=500)] = 24
    turns: Annotated[int, Bound(ge=1, le=50)] = 8

    @property
    def endpoint(self) -> JudgeSpec:
        """The endpoint as a judge's: asked through the worker, which alone has the key and a network."""
        return JudgeSpec(name="llm", base_url=self.base_url, model=self.model, api_key_env=KEY)
