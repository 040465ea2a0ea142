"""Parts of an answer that are asked for beside its text: ignored where there is nothing, refused where we lack it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from app.inference.responses import ResponseCreate
from app.inference.schemas import CompletionCreate


def ask(*included: str) -> dict[str, Any]:
    return {"model": "tiny", "input": "Hello", "include": list(included)}


def test_what_no_answer_here_has_is_ignored() -> None:
    asked = ResponseCreate.model_validate(ask("reasoning.encrypted_content", "web_search_call.action.sources"))
    assert asked.ask() == ResponseCreate.model_validate({"model": "tiny", "input": "Hello"}).ask()


@pytest.mark.parametrize(
    ("included", "reason"),
    [("message.output_text.logprobs", "only chat completions"), ("nonsense", "Input should be")],
)
def test_what_an_answer_could_have_or_nobody_knows_is_refused(included: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        ResponseCreate.model_validate(ask(included))


def test_logprobs_of_a_prompt_are_refused_and_not_left_out() -> None:
    asked = {"model": "tiny", "prompt": "Hello", "echo": True}
    assert CompletionCreate.model_validate(asked).echo
    with pytest.raises(ValidationError, match="leave echo out"):
        CompletionCreate.model_validate(asked | {"logprobs": 1})
