"""Inspect AI by its default route, the Responses API, and by the one for other services."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes

from tests.clients.scripts.checks import MODEL, Check, place, tell

PLACE = place()
os.environ |= {"SPARD_BASE_URL": PLACE.url, "SPARD_API_KEY": PLACE.key}  # which `openai-api/spard` reads


def evaluate(model: str, **settings: Any) -> Any:
    task = Task(dataset=[Sample(input="hello", target="e")], scorer=includes())
    return eval(task, model=model, display="none", log_dir=mkdtemp(), max_retries=0, **settings)[0]


def answers(model: str, **settings: Any) -> None:
    found = evaluate(model, max_tokens=8, **settings)
    assert found.status == "success", found.error
    assert found.samples[0].output.completion


def says_what_is_missing() -> None:
    found = evaluate("openai/nowhere")
    assert found.status == "error"
    assert "'nowhere' does not exist" in found.error.message, found.error.message


CHECKS: dict[str, Check] = {"a model that is not offered": says_what_is_missing}
ANSWERS: dict[str, Check] = {
    "its default route": lambda: answers(f"openai/{MODEL}"),
    "responses, asked for": lambda: answers(f"openai/{MODEL}", model_args={"responses_api": True}),
    "chat completions": lambda: answers(f"openai/{MODEL}", model_args={"responses_api": False}),
    "its route for other services": lambda: answers(f"openai-api/spard/{MODEL}"),
}

if __name__ == "__main__":
    os.chdir(Path(mkdtemp()))
    tell(CHECKS | (ANSWERS if PLACE.with_inference else {}))
