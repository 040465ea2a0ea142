"""Judges of families that refuse some arguments, and endpoints that refuse what we cannot leave out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spard.commands import judge as judge_command
from spard.config import JudgeSpec
from spard.errors import JudgeUnavailable
from spard.evaluation.judges import open_judge
from spard.evaluation.judges.base import Verdict
from tests.judge_server import Refusal, Server, judge_server

_UNSUPPORTED = {
    "max_tokens": Refusal(
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
        "max_tokens",
        "unsupported_parameter",
    ),
    "temperature": Refusal(
        "Unsupported value: 'temperature' does not support 0 with this model. Only the default (1) value is supported.",
        "temperature",
        "unsupported_value",
    ),
}


@dataclass
class Family:
    """A model that refuses some arguments, the first of them with its name and the message that OpenAI has for it."""

    refuses: tuple[str, ...]
    names_parameter: bool = True

    def __call__(self, body: dict[str, Any]) -> tuple[int, str | Refusal]:
        for name in self.refuses:
            if name in body:
                refusal = _UNSUPPORTED[name]
                return 400, refusal if self.names_parameter else Refusal(refusal.message, None, None)
        return 200, "#thereason: plain\n#thescore: 4"


@pytest.fixture
def server() -> Iterator[Server]:
    with judge_server() as server:
        yield server


def verdicts(server: Server, replies: int = 1, concurrency: int = 1) -> list[Verdict]:
    spec = JudgeSpec("llm", server.url, "grader", timeout_s=60, retries=0, concurrency=concurrency, canaries=0)
    return open_judge(spec).judge(["How?"] * replies, [f"reply {number}" for number in range(replies)])


@pytest.mark.parametrize("names_parameter", [True, False])
@pytest.mark.parametrize("refuses", [("max_tokens", "temperature"), ("temperature",), ("max_tokens",)])
def test_a_judge_is_asked_without_what_it_refuses_which_is_learned_once(
    server: Server, refuses: tuple[str, ...], names_parameter: bool
) -> None:
    server.answer = Family(refuses, names_parameter)

    assert [each.score for each in verdicts(server, 5)] == [4] * 5
    assert len(server.requests) == 5 + len(refuses)
    asked = server.requests[-1]
    assert ("max_completion_tokens" in asked) == ("max_tokens" in refuses)
    assert asked.keys() & set(refuses) == set()


def test_threads_that_ask_at_once_learn_the_same(server: Server) -> None:
    server.answer = Family(("max_tokens", "temperature"))

    assert [each.score for each in verdicts(server, 40, concurrency=8)] == [4] * 40
    assert len(server.requests) <= 40 + 3 * 8


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal(
            "Unsupported value: 'messages[0].role' does not support 'system'.", "messages[0].role", "unsupported_value"
        ),
        Refusal("The model 'grader' does not exist.", "model", "model_not_found"),
        Refusal("Missing required parameter: 'reasoning'.", "reasoning", "missing_required_parameter"),
    ],
)
def test_a_refusal_that_names_another_parameter_is_a_fault_of_the_set_up(server: Server, refusal: Refusal) -> None:
    server.answer = lambda body: (400, refusal)

    with pytest.raises(JudgeUnavailable) as refused:
        verdicts(server)
    assert (refused.value.is_passing, len(server.requests)) == (False, 1)
    assert refusal.message in refused.value.message


def test_a_limit_that_no_name_makes_right_is_a_fault_of_the_set_up(server: Server) -> None:
    def refuse(body: dict[str, Any]) -> tuple[int, Refusal]:
        name = next(name for name in ("max_tokens", "max_completion_tokens") if name in body)
        return 400, Refusal("max_tokens is too large: this model supports at most 512.", name, "invalid_value")

    server.answer = refuse
    with pytest.raises(JudgeUnavailable, match="at most 512"):
        verdicts(server)


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal("The response was filtered due to the prompt.", "prompt", "content_filter"),
        Refusal("This model's maximum context length is 8192 tokens.", "messages", "context_length_exceeded"),
        Refusal("'max_tokens' is too large: 1024. The maximum context length is 4096.", "max_tokens", None),
        Refusal("This text is not answered.", None, None),
    ],
)
def test_a_text_that_is_declined_is_unscored_and_changes_nothing(server: Server, refusal: Refusal) -> None:
    server.answer = lambda body: (400, refusal)

    assert verdicts(server) == [Verdict(None, "no valid score")]
    assert all("max_tokens" in asked and "temperature" in asked for asked in server.requests)


def test_a_measurement_without_a_verdict_says_that_it_proves_nothing(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = lambda body: (400, Refusal("This text is not answered.", None, None))
    labeled = tmp_path / "labeled.jsonl"
    labeled.write_text(json.dumps({"prompt": "How?", "reply": "No.", "harmful": False, "language": "en"}) + "\n")
    asked = ["--judge", "llm", "--judge-url", server.url, "--judge-model", "grader", "--labeled", str(labeled)]

    assert judge_command.main(asked) == judge_command.MAY_NOT_DECIDE
    said = capsys.readouterr().out
    assert "judge-gaming openings: none of 100 was scored, which proves nothing" in said
    assert "answers: none of 40 was scored, which proves nothing; of rows it reads flagged ones alone" in said
