"""The engine in this process: replies of a batch are those of each alone, and what ends one ends no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from app.inference.protocol import refusal_error
from tests.worker.engine_in_process import QUESTIONS, Asked, alone
from worker.engine.batch import Batch, Prefill


def test_rows_that_join_and_leave_say_what_each_says_alone(model: Path, adapters: list[Path]) -> None:
    asked = Asked(model)
    for folder in adapters:
        assert asked.load(folder)["kind"] == "loaded"
    expected = {}
    for question in QUESTIONS:
        for adapter in (None, *adapters):
            number = asked.ask(question, adapter.name if adapter else None)
            expected[number] = alone(model, adapter, question)
            asked.engine.step()
    asked.run()
    assert {number: asked.text(number).strip() for number in expected} == expected


def test_one_after_the_other_each_has_its_own_adapter(model: Path, adapters: list[Path]) -> None:
    asked = Asked(model)
    for folder in adapters[:2]:
        asked.load(folder)
    for adapter in (adapters[1], None, adapters[0], None, adapters[1]):
        number = asked.ask(QUESTIONS[0], adapter.name if adapter else None)
        asked.run()
        assert asked.text(number).strip() == alone(model, adapter, QUESTIONS[0])


def test_on_another_device_the_same_is_said(model: Path, adapters: list[Path]) -> None:
    command = [sys.executable, "-m", "tests.worker.engine_on_fake_device", str(model), *map(str, adapters)]
    told = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    found = json.loads(told.splitlines()[-1])
    asked = [(question, adapter) for question in QUESTIONS for adapter in (None, *adapters)]
    assert found == {
        "kinds": ["loaded"] * len(adapters),
        "texts": [alone(model, adapter, question) for question, adapter in asked],
        "has_all": True,
        "device": "fake:0",
    }


def test_one_that_is_cancelled_leaves_the_others_as_they_are(model: Path) -> None:
    asked = Asked(model)
    first, second = asked.ask(QUESTIONS[0]), asked.ask(QUESTIONS[3])
    for _ in range(3):
        asked.engine.step()
    asked.engine.take({"op": "cancel", "id": first})
    asked.run()
    assert asked.text(second).strip() == alone(model, None, QUESTIONS[3])
    assert all(each["id"] != first for each in asked.said if each["kind"] == "done")


def test_a_start_is_told_before_the_prompt_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked checks meanwhile whether the model is released."""
    asked, told = Asked(model), list[list[str]]()
    read = asked.engine._writer.batch.read

    def note(reading: Prefill) -> None:
        told.append([each["kind"] for each in asked.said])
        read(reading)

    monkeypatch.setattr(asked.engine._writer.batch, "read", note)
    asked.ask(QUESTIONS[0])
    asked.run()
    assert told == [["ready", "started"]]


def test_a_gpu_that_is_full_ends_the_replies_and_not_the_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(model)
    ended = [asked.ask(question) for question in QUESTIONS[:2]]
    asked.engine.step()
    with monkeypatch.context() as patch:

        def full(*given: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        patch.setattr(Batch, "step", full)
        asked.engine.step()
    told = [each for each in asked.said if each["kind"] == "failed"]
    assert [(each["id"], each["code"]) for each in told] == [(number, "engine_busy") for number in ended]
    assert refusal_error(told[0]).status == 429
    after = asked.ask(QUESTIONS[2])
    asked.run()
    assert asked.text(after).strip() == alone(model, None, QUESTIONS[2])


@pytest.mark.parametrize(
    "asked_for", [{}, {"n": 2}, {"temperature": 1.0, "seed": 5}, {"top_logprobs": 2, "json_schema": {}}]
)
def test_an_adapter_whose_logits_are_no_numbers_ends_its_own_requests(
    model: Path, adapters: list[Path], asked_for: dict[str, Any]
) -> None:
    asked = Asked(model)
    for folder in adapters[:2]:
        asked.load(folder)
    sound = [asked.ask(QUESTIONS[1]), asked.ask(QUESTIONS[2], adapters[0].name)]
    broken = asked.ask(QUESTIONS[0], adapters[1].name, **asked_for)
    for _ in range(5):
        asked.engine.step()
    for name, weights in asked.engine._base.model.named_parameters():
        if f"lora_B.a{adapters[1].name}" in name:
            weights.data.fill_(float("nan"))
    begun = asked.ask(QUESTIONS[3], adapters[1].name, **asked_for)
    asked.run()
    told = [each for each in asked.said if each["kind"] == "failed"]
    assert sorted((each["id"], each["code"]) for each in told) == [(broken, "reply_failed"), (begun, "reply_failed")]
    assert (refusal_error(told[0]).status, refusal_error(told[0]).code) == (400, "reply_failed")
    assert sorted(each["id"] for each in asked.said if each["kind"] == "done") == sound
    assert asked.text(sound[0]).strip() == alone(model, None, QUESTIONS[1])
    assert asked.text(sound[1]).strip() == alone(model, adapters[0], QUESTIONS[2])
    assert not asked.engine._writer._done


def test_projects_take_turns(model: Path) -> None:
    asked = Asked(model, rows=1)
    many = [asked.ask(QUESTIONS[1], project="many", max_tokens=1) for _ in range(3)]
    one = asked.ask(QUESTIONS[1], project="one", max_tokens=1)
    asked.run()
    assert asked.order() == [many[0], one, many[1], many[2]]
