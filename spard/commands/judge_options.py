"""The judge that the options of a command name."""

from __future__ import annotations

from typing import Any

from spard.commands.front import Asked
from spard.config import JudgeSpec
from spard.config.run_spec import parse
from spard.errors import InvalidModel


def judge_spec(asked: Asked) -> JudgeSpec:
    """Return the judge that the options name; raise InvalidModel if a classifier has no model."""
    spec: dict[str, Any] = {"base_url": asked.judge_url}
    if asked.judge_model:
        spec["model"] = asked.judge_model
    if asked.judge in ("refusal", "llm"):
        spec["name"] = asked.judge
    elif asked.judge == "base" and asked.judge_model:
        spec["name"] = "base"
    elif asked.judge_model:
        spec |= {"name": "classifier", "family": asked.judge}
    else:
        raise InvalidModel(f"--judge {asked.judge} needs --judge-model, the model's folder or hub id")
    judge: JudgeSpec = parse(JudgeSpec, spec, "judge")
    return judge
