"""DSPy's `LM.finetune`, which uploads, files the job, follows it and hands back a model to call."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import dspy
import openai
from dspy.clients.utils_finetune import TrainDataFormat

from tests.clients.scripts.checks import MODEL, Check, place, tell, wait_until

PLACE = place()
ROWS = [json.loads(line) for line in PLACE.train.read_text().splitlines()]


def _start() -> Any:
    # What DSPy's documentation has for a model that litellm does not know: the provider is named.
    model: Any = dspy.LM(
        f"openai/{MODEL}", api_base=PLACE.url, api_key=PLACE.key, provider=dspy.clients.openai.OpenAIProvider()
    )
    return model.finetune(ROWS, TrainDataFormat.CHAT, {"n_epochs": 1})


@cache
def tuned_model() -> Any:
    return _start().result()


def finetune() -> None:
    assert tuned_model().model.removeprefix("openai/").startswith(f"ft:{MODEL}:"), tuned_model().model


def cancel() -> None:
    job = _start()
    wait_until(lambda: job.provider_job_id is not None)
    name, file = job.provider_job_id, job.provider_file_id
    job.cancel()
    assert openai.fine_tuning.jobs.retrieve(name).status == "cancelled"
    try:
        openai.files.retrieve(file)
    except openai.NotFoundError:
        return
    raise AssertionError("the file is still there")


def call() -> None:
    # litellm takes an `ft:` name for OpenAI's only where the base model is one of theirs, so it is named again.
    name = tuned_model().model.removeprefix("openai/")
    assert dspy.LM(f"openai/{name}", api_base=PLACE.url, api_key=PLACE.key)("hello", max_tokens=8)


CHECKS: dict[str, Check] = {"cancel, which deletes the file": cancel}
TRAINING: dict[str, Check] = {"finetune, to the tuned model": finetune}

if __name__ == "__main__":
    dspy.settings.configure(experimental=True)
    wanted = CHECKS | (TRAINING if PLACE.with_training else {})
    tell(wanted | ({"the tuned model answers": call} if PLACE.with_inference and PLACE.with_training else {}))
