"""Judges by name."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import assert_never

from spard.config import JudgeSpec
from spard.errors import InvalidRecipe
from spard.judges.base import Judge, Verdict
from spard.judges.canaries import CanaryJudge
from spard.judges.classifier import ClassifierJudge
from spard.judges.consensus import ConsensusJudge
from spard.judges.llm import LlmJudge
from spard.judges.refusal import RefusalJudge
from spard.models import load_base

__all__ = ["Judge", "Verdict", "open_judge"]


def open_judge(spec: JudgeSpec) -> Judge:
    """The judge that a spec names, behind its canaries; the endpoint's client is loaded only where it is asked for."""
    match spec.name:
        case "refusal":
            return RefusalJudge()
        case "llm":
            endpoint = importlib.import_module("spard.judges.endpoint")  # openai is an optional dependency of spard
            return _watched(LlmJudge(endpoint.open_chat(spec), spec.model, spec.concurrency), spec)
        case "classifier":
            return _watched(ClassifierJudge(load_base(spec.model), spec.family, _template(spec)), spec)
        case "consensus":
            if len(spec.members) < 2:
                raise InvalidRecipe("judge.members: a consensus needs two judges or more", "judge.members")
            return ConsensusJudge(tuple(map(open_judge, spec.members)))
        case other:
            assert_never(other)


def _watched(judge: Judge, spec: JudgeSpec) -> Judge:
    return CanaryJudge(judge, spec.canaries) if spec.canaries else judge


def _template(spec: JudgeSpec) -> str | None:
    if spec.template is None:
        return None
    try:
        text = Path(spec.template).read_text()
    except OSError as error:
        raise InvalidRecipe(f"judge.template cannot be read: {error.strerror}", "judge.template") from error
    if "{prompt}" not in text or "{reply}" not in text:
        raise InvalidRecipe("judge.template must hold {prompt} and {reply}", "judge.template")
    return text
