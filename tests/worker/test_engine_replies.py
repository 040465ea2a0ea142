"""What an engine's reply is made of: a form it is held to, how its tokens are chosen, and where its text ends."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from app.inference.json_limits import Schema
from tests.spard.parts import byte_tokenizer
from tests.worker.engine_in_process import QUESTIONS, Asked, alone
from worker.engine.replies import Text


def test_a_row_with_a_schema_leaves_the_others_as_they_are(model: Path, adapters: list[Path]) -> None:
    asked = Asked(model)
    asked.load(adapters[0])
    items = {"type": "array", "items": {"type": "integer", "minimum": 10, "maximum": 99}, "minItems": 2, "maxItems": 3}
    free = asked.ask(QUESTIONS[1], adapters[0].name)
    held = asked.ask(QUESTIONS[1], adapters[0].name, json_schema=items)
    asked.run()
    assert asked.text(free).strip() == alone(model, adapters[0], QUESTIONS[1])
    found = json.loads(asked.text(held))
    assert len(found) in (2, 3)
    assert all(10 <= each <= 99 for each in found)


def test_a_schema_of_as_many_references_as_are_taken_does_not_end_the_engine(model: Path) -> None:
    links: dict[str, Any] = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}, "type": "array"} for i in range(480)}
    schema = {"$defs": links | {"d480": {"type": "string"}}, "$ref": "#/$defs/d0"}
    TypeAdapter(Schema).validate_python(schema)
    asked = Asked(model)
    held = asked.ask(QUESTIONS[0], json_schema=schema)
    asked.run()
    assert asked.text(held).startswith("[")


def test_an_engine_without_the_library_refuses_a_schema(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    asked = Asked(model)
    asked.ask(QUESTIONS[0], json_schema={"type": "object"})
    asked.run()
    assert (asked.said[-1]["kind"], asked.said[-1]["code"]) == ("failed", "unsupported_parameter")


def test_seeds_penalties_and_probabilities(model: Path) -> None:
    asked = Asked(model)
    same = [asked.ask(QUESTIONS[0], temperature=1.0, seed=5) for _ in range(2)]
    two = asked.ask(QUESTIONS[0], temperature=1.5, n=2, seed=5, top_p=0.9)
    often = asked.ask(QUESTIONS[1], presence_penalty=2.0, frequency_penalty=2.0)
    told = asked.ask(QUESTIONS[0], top_logprobs=2)
    asked.run()
    assert asked.text(same[0]) == asked.text(same[1])
    assert asked.text(two, 0) != asked.text(two, 1)
    assert asked.text(often) != alone(model, None, QUESTIONS[1])
    tokens = [
        token for each in asked.said if each["kind"] == "piece" and each["id"] == told for token in each["tokens"]
    ]
    assert tokens
    for token in tokens:  # greedy: each is the likeliest
        assert token["top_logprobs"][0]["token"] == token["token"]
        assert 0 >= token["logprob"] >= token["top_logprobs"][1]["logprob"]


def test_no_half_of_a_character_is_shown_and_nothing_from_a_stop_on() -> None:
    tokenizer = byte_tokenizer()
    (ids,) = tokenizer(["Größe: 5 € STOP and more"], add_special_tokens=False)["input_ids"]
    text = Text(tokenizer, ["STOP", "never"])
    shown = [text.add(token) for token in ids]
    assert "".join(shown) + text.end() == "Größe: 5 € "
    assert text.is_stopped
    assert not any("\ufffd" in each for each in shown)
    rest = Text(tokenizer, ["STOP"])
    assert "".join(rest.add(token) for token in ids[:16]) + rest.end() == tokenizer.decode(ids[:16])


def test_what_may_begin_a_stop_is_held_back() -> None:
    draw = random.Random(7)
    for _ in range(200):
        stops = ["".join(draw.choices("ab", k=draw.randint(1, 6))) for _ in range(3)]
        written, text, shown = "".join(draw.choices("abc", k=30)), Text(byte_tokenizer(), stops), ""
        for at, token in enumerate(byte_tokenizer()(written, add_special_tokens=False)["input_ids"], 1):
            shown += text.add(token)
            if text.is_stopped:
                break
            held = max((n for stop in stops for n in range(len(stop)) if written[:at].endswith(stop[:n])), default=0)
            assert shown == written[: at - held]
        ends = [end for stop in stops if (end := written[:at].find(stop)) >= 0]
        assert shown + text.end() == written[: min(ends, default=len(written))]


def test_what_opens_an_answer_is_no_part_of_the_reply() -> None:
    tokenizer = byte_tokenizer()
    for reply, shown in ((" to=user|Hello.", "Hello."), ("Hello.", "Hello."), (" to=us", " to=us"), ("é", "é")):
        text = Text(tokenizer, ["|x"], " to=user|")
        ids = tokenizer(reply, add_special_tokens=False)["input_ids"]
        assert "".join([*(text.add(each) for each in ids), text.end()]) == shown
