"""The engine that generated an audit's replies. Uses only the standard library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
