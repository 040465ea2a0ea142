"""Judges by name."""

from __future__ import annotations

import importlib
from typing import assert_never

from spard.config import JudgeSpec
from spard.judges.base import Judge, Verdict
from spard.judges.llm import LlmJudge
from spard.judges.refusal import RefusalJudge

__all__ = ["Judge", "Verdict", "open_judge"]


def open_judge(spec: JudgeSpec) -> Judge:
    """The judge that a spec names; the endpoint's client is loaded only where it is asked for."""
    match spec.name:
        case "refusal":
            return RefusalJudge()
        case "llm":
            endpoint = importlib.import_module("spard.judges.endpoint")  # openai is an optional dependency of spard
            return LlmJudge(endpoint.open_chat(spec), spec.model, spec.concurrency)
        case other:
            assert_never(other)
