"""LlamaIndex's OpenAIFinetuneEngine: upload and job in one call, then the tuned model as an LLM of theirs."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

from tests.clients.scripts.checks import MODEL, Check, place, tell, wait_until

PLACE = place()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says of itself that it is no longer maintained
    from llama_index.finetuning import OpenAIFinetuneEngine


def _engine(rows: str, **options: Any) -> Any:
    # Its own check of the rows counts tokens with a vocabulary that it downloads.
    return OpenAIFinetuneEngine(MODEL, str(PLACE.folder / rows), validate_json=False, **options)


@cache
def finetuned_engine() -> Any:
    engine = _engine("train.jsonl")
    engine.finetune()
    return engine


def current_job() -> None:
    job = finetuned_engine().get_current_job()
    assert (job.model, job.id[:6]) == (MODEL, "ftjob-")


def not_ready() -> None:
    engine = _engine("train.jsonl")
    engine.finetune()
    said = ""
    try:
        engine.get_finetuned_model()
    except ValueError as error:
        said = str(error)
    engine._client.fine_tuning.jobs.cancel(engine.get_current_job().id)
    assert "not have a finetuned model id ready" in said


def bad_file() -> None:
    """It sends again for ever what is refused; where the provider lets bad files make failed jobs, it ends."""
    engine = _engine("bad.jsonl")
    engine.finetune()
    job = engine.get_current_job()
    assert (job.status, job.error.code) == ("failed", "invalid_training_file")


def start_job_id() -> None:
    job = _engine("train.jsonl", start_job_id=PLACE.job).get_current_job()
    assert (job.id, job.status) == (PLACE.job, "succeeded")


def model() -> None:
    wait_until(lambda: finetuned_engine().get_current_job().finished_at is not None)
    assert finetuned_engine().get_finetuned_model().model.startswith(f"ft:{MODEL}:")


def complete() -> None:
    assert finetuned_engine().get_finetuned_model(max_tokens=8).complete("hello").text


CHECKS: dict[str, Check] = {
    "finetune": finetuned_engine,
    "get_current_job": current_job,
    "get_finetuned_model, too early": not_ready,
    "finetune, on a bad file": bad_file,
    "start_job_id": start_job_id,
}
TRAINING: dict[str, Check] = {"get_finetuned_model": model}

if __name__ == "__main__":
    wanted = CHECKS | (TRAINING if PLACE.with_training else {})
    tell(wanted | ({"the tuned model completes": complete} if PLACE.with_inference and PLACE.with_training else {}))
