"""Which engine wrote the replies of an audit. Only the standard library is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class AuditEngineRecord:
    """The engine of an audit, the same for the base model and the trained one.

    version      of transformers or of vLLM
    gpus         that held one model together
    asked        the engine that the provider has set
    why          why transformers answered in its place; empty where the engine that was asked for did
    prompts      of the probe of the trained model; None with transformers, as the next ones are
    tolerance    how far vLLM's first tokens might be from transformers', in nats of a log-probability
    difference   how far they were
    to_base      how far the adapter's are from the base model's, in transformers
    replies      how many prompts each engine was asked
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
