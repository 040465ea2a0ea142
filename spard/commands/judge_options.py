"""The judge that a command's options name."""

from __future__ import annotations

import os

from spard.commands.front import Asked
from spard.config import JudgeSpec
from spard.config.extensions import JUDGES
from spard.config.run_spec import parse
from spard.errors import InvalidModel, InvalidRecipe

ADDRESS = "OPENAI_BASE_URL"  # read by the llm judge's client by default
_FAMILIES = "harmbench", "llama_guard", "qwen3guard", "wildguard"
_SAYS_TOO_LITTLE = "classifier", "consensus"  # a classifier is named by family; consensus needs members


def names() -> tuple[str, ...]:
    """Return the accepted values of `--judge`: shipped judges, judges of installed packages, classifier families."""
    return (*(name for name in JUDGES.names() if name not in _SAYS_TOO_LITTLE), *_FAMILIES)


def judge_spec(asked: Asked) -> JudgeSpec:
    """Return the judge that the options name; raise `InvalidModel` if its model or its address is missing."""
    spec: dict[str, object] = {"base_url": asked.judge_url}
    if asked.judge_model:
        spec["model"] = asked.judge_model
    if asked.judge in ("base", *_FAMILIES) and not asked.judge_model:
        raise InvalidModel(f"--judge {asked.judge} needs --judge-model, the model's folder or hub id")
    if asked.judge == "local" and not asked.judge_model:
        raise InvalidModel("--judge local needs --judge-model, the file that `spard judge train` has written")
    if asked.judge in _FAMILIES:
        template = getattr(asked, "judge_template", None)
        spec |= {"name": "classifier", "family": asked.judge, "template": template and str(template)}
    else:
        spec["name"] = asked.judge
        spec["base_url"] = asked.judge_url or os.environ.get(ADDRESS)
    if asked.judge == "llm" and not spec["base_url"]:
        raise InvalidModel("--judge llm needs --judge-url, the address of the endpoint that is to read the replies")
    judge: JudgeSpec = parse(JudgeSpec, spec, "judge")
    return judge


def check_address(judge: JudgeSpec) -> None:
    """Raise `InvalidRecipe` for an `llm` judge without an explicit address: rows and replies must not go elsewhere."""
    if any(each.name == "llm" and not (each.base_url or os.environ.get(ADDRESS)) for each in judge.with_members()):
        raise InvalidRecipe("judge.base_url: the llm judge needs the address of its endpoint", "judge.base_url")
