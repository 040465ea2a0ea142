"""Projects share the rows of an engine: nobody keeps half of them from others who wait, and pauses change no reply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from tests.spard.parts import RECURRENT
from tests.worker.engine_in_process import QUESTIONS, Asked, alone
from worker.engine import batch, writer
from worker.engine.batch import BASE, Batch
from worker.engine.replies import Rules

PROMPT = list(range(5, 25))
PAST = 10**6  # a token without an embedding


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "TURN_TOKENS", 4)


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no token end a reply, so that each has as many as are asked for."""
    monkeypatch.setattr(Rules, "ends", lambda rules, ask: frozenset())


def count_rows(asked: Asked, project: str) -> int:
    return asked.engine._writer.turns.count_rows(project)


@pytest.mark.usefixtures("endless")
def test_while_others_wait_a_project_has_at_most_half_of_the_rows(model: Path) -> None:
    asked = Asked(model, rows=4)
    loud = [asked.ask(QUESTIONS[0], project="loud", max_tokens=40) for _ in range(6)]
    for _ in range(8):
        asked.engine.step()
    assert count_rows(asked, "loud") == 4
    quiet = [asked.ask(QUESTIONS[1], project="quiet", max_tokens=20) for _ in range(4)]
    for _ in range(4):
        asked.engine.step()
        assert count_rows(asked, "loud") + count_rows(asked, "quiet") <= 4
    assert (count_rows(asked, "loud"), count_rows(asked, "quiet")) == (2, 2)
    asked.run()
    texts = {asked.text(number) for number in loud}, {asked.text(number) for number in quiet}
    assert [len(each) for each in texts] == [1, 1]


def test_a_short_reply_waits_for_no_long_one_and_neither_changes(model: Path, adapters: list[Path]) -> None:
    asked = Asked(model, rows=2)
    asked.load(adapters[0])
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 7, "n": 3, "max_tokens": 24}
    greedy = asked.ask(QUESTIONS[3], project="loud", n=2)
    drawn = asked.ask(QUESTIONS[2], adapters[0].name, project="loud", **sampled)
    for _ in range(6):
        asked.engine.step()
    short = asked.ask(QUESTIONS[1], project="quiet", max_tokens=2)
    for _ in range(4):
        asked.engine.step()
    assert {"kind": "done", "id": short, "reply_tokens": 2} in asked.said
    asked.ask(QUESTIONS[1], project="quiet", n=2)
    asked.run()

    assert {asked.text(greedy, i).strip() for i in range(2)} == {alone(model, None, QUESTIONS[3])}
    undisturbed = Asked(model, rows=4)
    undisturbed.load(adapters[0])
    number = undisturbed.ask(QUESTIONS[2], adapters[0].name, **sampled)
    undisturbed.run()
    assert [asked.text(drawn, i) for i in range(3)] == [undisturbed.text(number, i) for i in range(3)]


@pytest.mark.usefixtures("endless")
def test_more_projects_than_rows_all_go_on(model: Path) -> None:
    asked = Asked(model, rows=2)
    numbers = [asked.ask(QUESTIONS[1], project=f"p{i}", max_tokens=40) for i in range(4)]
    while not all(asked.text(number) for number in numbers):
        asked.engine.step()
    assert not any(each["kind"] == "done" for each in asked.said)  # each had a turn before the first one had ended
    asked.run()
    assert len({asked.text(number) for number in numbers}) == 1
    assert sorted(each["reply_tokens"] for each in asked.said if each["kind"] == "done") == [40] * 4


def test_what_may_be_paused_is_bounded(model: Path) -> None:
    asked = Asked(model, rows=1)
    for i in range(8):
        asked.ask(QUESTIONS[0], project=f"p{i}")
    most = 0
    while asked.engine.is_busy:
        asked.engine.step()
        most = max(most, len(asked.engine._writer.turns.seats))
    assert most == 1 + 3
    assert sum(each["kind"] == "done" for each in asked.said) == 8


def test_requests_whose_client_leaves_while_they_wait_are_forgotten(model: Path) -> None:
    asked = Asked(model, rows=1)
    gone, stays = asked.ask(QUESTIONS[0], project="a"), asked.ask(QUESTIONS[1], project="b")
    while asked.engine._writer.turns.lines.get("a") is None:
        asked.engine.step()
    asked.engine.take({"op": "cancel", "id": gone})
    asked.run()
    assert asked.text(stays).strip() == alone(model, None, QUESTIONS[1])
    assert not any(each["kind"] == "done" and each["id"] == gone for each in asked.said)


def test_a_long_prompt_is_read_in_parts_between_the_steps_of_others(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "CHUNK", 4)
    asked = Asked(model)
    first = asked.ask(QUESTIONS[0], project="a")
    while not asked.text(first):
        asked.engine.step()
    second = asked.ask(QUESTIONS[3], project="b")
    before = len(asked.text(first))
    while not asked.text(second):
        asked.engine.step()
    assert len(asked.text(first)) > before + 1
    asked.run()
    assert asked.text(second).strip() == alone(model, None, QUESTIONS[3])


LLAMA = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.mark.parametrize("config", [LLAMA, *RECURRENT.values()], ids=["llama", *RECURRENT])
def test_rows_that_were_paused_go_on_as_if_they_had_not_been(config: PretrainedConfig) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    undisturbed, paused = Batch(model), Batch(model)
    for each in (undisturbed, paused):
        each.join(PROMPT, BASE, 2)
    written: list[list[int]] = [[], []]
    for number in range(12):
        if number == 5:
            rows = paused.pause([0, 1])
            paused.join(PROMPT[:7], BASE, 1)  # another request's turn
            paused.step([3])
            other = paused.pause([0])
            paused.resume(rows)
        for tokens, each in zip(written, (undisturbed, paused), strict=True):
            chosen = each.logits_BV.argmax(dim=-1).tolist()
            tokens += chosen
            each.step(chosen)
    assert other.names == [BASE]
    assert len(set(written[0])) > 4
    assert written[0] == written[1]


def test_requests_that_cannot_be_begun_cost_their_project_its_turn(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(model, rows=1)
    ids = asked.engine._prompts.ids
    monkeypatch.setattr(
        asked.engine._prompts, "ids", lambda ask, *more: [PAST] if ask["seed"] == 0 else ids(ask, *more)
    )
    for _ in range(5):
        asked.ask(QUESTIONS[0], project="loud", seed=0)
    quiet = asked.ask(QUESTIONS[1], project="quiet", max_tokens=1)
    for _ in range(2):
        asked.engine.step()
    assert asked.order() == [quiet]
    asked.run()
    assert len([each for each in asked.said if each["kind"] == "failed"]) == 5
