"""A request that the model cannot read, or that cannot be begun, ends alone; the engine and all others go on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from app.inference.protocol import refusal_error
from spard.data import chat
from tests.spard.parts import byte_tokenizer
from tests.worker.engine_in_process import QUESTIONS, Asked, alone
from worker.engine.batch import Batch
from worker.engine.replies import Rules

PAST = 999


def read_failures(asked: Asked) -> list[tuple[int, str]]:
    return [(each["id"], each["code"]) for each in asked.said if each["kind"] == "failed"]


def test_a_prompt_with_a_token_past_the_embeddings_ends_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(model)
    sound = asked.ask(QUESTIONS[1])
    asked.engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(asked.engine._prompts, "ids", lambda *given: [1, 2, PAST])
        bad = asked.ask(QUESTIONS[0])
        asked.engine.step()
    asked.run()
    assert read_failures(asked) == [(bad, "invalid_messages")]
    assert asked.text(sound).strip() == alone(model, None, QUESTIONS[1])


def test_a_prompt_on_which_the_model_fails_ends_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(model)
    sound = asked.ask(QUESTIONS[1])
    asked.engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(Batch, "_forward", _raises)
        bad = asked.ask(QUESTIONS[0])
        asked.engine._writer._give_rows()
        asked.engine._writer._read()
    asked.run()
    assert read_failures(asked) == [(bad, "reply_failed")]
    assert asked.text(sound).strip() == alone(model, None, QUESTIONS[1])


def test_a_request_that_cannot_be_begun_ends_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(model)
    with monkeypatch.context() as patch:
        patch.setattr(Rules, "ends", _raises)
        bad = asked.ask(QUESTIONS[0])
        asked.engine.step()
    sound = asked.ask(QUESTIONS[1])
    asked.run()
    assert read_failures(asked) == [(bad, "reply_failed")]
    assert asked.text(sound).strip() == alone(model, None, QUESTIONS[1])


def test_a_step_that_fails_ends_its_replies_and_not_the_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(model)
    ended = [asked.ask(question) for question in QUESTIONS[:2]]
    asked.engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(Batch, "step", _raises)
        asked.engine.step()
    assert read_failures(asked) == [(number, "reply_failed") for number in ended]
    assert refusal_error(asked.said[-1]).code == "reply_failed"
    after = asked.ask(QUESTIONS[2])
    asked.run()
    assert asked.text(after).strip() == alone(model, None, QUESTIONS[2])


def test_a_control_token_past_the_embeddings_is_spelled_out(model: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<|last|>", special=True), AddedToken("<|image|>", special=True)])
    assert max(chat.render_question(tokenizer, "Look: <|image|>")) < len(tokenizer) - 1


def _raises(*given: Sequence[Any], **more: Any) -> Any:
    raise IndexError("index out of range in self")
