"""The steps of OpenAI's cookbook "How to fine-tune chat models", in its order, on rows of the lab.

Written anew after its cells: look at the rows, upload two files, file the job, follow it, read its events and metrics,
and ask the tuned model.
"""

from __future__ import annotations

import json
import time
from functools import cache
from typing import Any

from openai import OpenAI

from tests.clients.scripts.checks import ENDED, MODEL, Check, place, tell

PLACE = place()
client: Any = OpenAI()  # address and key are in the environment, as the cookbook has it


def upload_file(name: str, purpose: str) -> str:
    with (PLACE.folder / name).open("rb") as file:
        response = client.files.create(file=file, purpose=purpose)
    made: str = response.id
    return made


def look_at_the_rows() -> None:
    rows = [json.loads(line) for line in PLACE.train.read_text().splitlines()]
    assert [message["role"] for message in rows[0]["messages"]][-2:] == ["user", "assistant"]


@cache
def training_file_id() -> str:
    return upload_file("train.jsonl", "fine-tune")


@cache
def validation_file_id() -> str:
    return upload_file("validation.jsonl", "fine-tune")


@cache
def job_id() -> str:
    made: str = client.fine_tuning.jobs.create(
        training_file=training_file_id(),
        validation_file=validation_file_id(),
        model=MODEL,
        suffix="recipe-ner",
    ).id
    return made


@cache
def follow_job() -> Any:
    while (response := client.fine_tuning.jobs.retrieve(job_id())).status not in ENDED:
        time.sleep(1)
    return response


def status() -> None:
    assert follow_job().status == "succeeded", follow_job().error
    assert follow_job().trained_tokens > 0


def events() -> None:
    follow_job()
    told = client.fine_tuning.jobs.list_events(job_id()).data
    told.reverse()
    assert told[-1].message == "The job has successfully completed"
    everything = [event.message for event in client.fine_tuning.jobs.list_events(job_id(), limit=100)]
    assert any("training loss" in message for message in everything)


def fine_tuned_model() -> None:
    assert follow_job().fine_tuned_model.startswith(f"ft:{MODEL}:")
    assert ":recipe-ner:" in follow_job().fine_tuned_model


def metrics() -> None:
    lines = client.files.content(follow_job().result_files[0]).text.splitlines()
    assert lines[0].startswith("step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy")
    assert len(lines) > 2


def checkpoints() -> None:
    found = client.fine_tuning.jobs.checkpoints.list(job_id()).data
    assert found
    assert all(each.metrics.full_valid_loss > 0 for each in found)


def chat() -> None:
    question = json.loads(PLACE.train.read_text().splitlines()[0])["messages"][:-1]
    response = client.chat.completions.create(
        model=follow_job().fine_tuned_model, messages=question, temperature=0, max_tokens=50
    )
    assert response.choices[0].message.content


def chat_streamed() -> None:
    ask = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 20}
    parts = client.chat.completions.create(model=follow_job().fine_tuned_model, stream=True, **ask)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices)


CHECKS: dict[str, Check] = {
    "look at the rows": look_at_the_rows,
    "upload the training file": training_file_id,
    "upload the validation file": validation_file_id,
    "create the job": job_id,
}
TRAINING: dict[str, Check] = {
    "poll its status to the end": status,
    "its events": events,
    "the name of the tuned model": fine_tuned_model,
    "its metrics": metrics,
    "its checkpoints": checkpoints,
}
INFERENCE: dict[str, Check] = {"ask the tuned model": chat, "ask it, streamed": chat_streamed}

if __name__ == "__main__":
    wanted = CHECKS | (TRAINING if PLACE.with_training else {})
    tell(wanted | (INFERENCE if PLACE.with_inference and PLACE.with_training else {}))
