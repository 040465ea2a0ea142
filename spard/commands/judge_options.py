"""The options with which commands name a judge."""

from __future__ import annotations

import argparse
from typing import Any

from spard.config import JudgeSpec
from spard.config.run_spec import parse
from spard.errors import InvalidModel

_CLASSIFIERS = ("harmbench", "llama_guard", "wildguard")


def add_judge_options(parser: argparse.ArgumentParser) -> None:
    """Add `--judge`, `--judge-model` and `--judge-url`."""
    parser.add_argument("--judge", choices=("refusal", "llm", "base", *_CLASSIFIERS), default="refusal")
    parser.add_argument("--judge-model", help="of the llm judge; or folder or hub id of the base model or classifier")
    parser.add_argument("--judge-url", help="OpenAI-compatible endpoint of the llm judge")


def judge_spec(asked: argparse.Namespace) -> JudgeSpec:
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
