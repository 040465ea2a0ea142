from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from spard.data.chat import render_prompt
from spard.data.control_tokens import end_tokens
from spard.models.base import Base
from spard.models.generate import generate

PROMPTS = [f"Do the thing {i}{'!' * (i % 11)}" for i in range(20)]
ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma"]


def one_by_one(base: Base, prompt: str, max_new_tokens: int) -> str:
    ids = torch.tensor([render_prompt(base.tokenizer, [{"role": "user", "content": prompt}])])
    out = base.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(end_tokens(base.tokenizer)),
    )
    text: str = base.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return text.strip()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_batches_answer_as_the_model_does_one_by_one(load: Callable[..., Base], architecture: str) -> None:
    base = load(architecture, torch.float64)  # in float32 two likely tokens may change places from batch to batch

    replies = generate(base.model, base.tokenizer, PROMPTS, 24, batch_size=8)

    assert replies == [one_by_one(base, prompt, 24) for prompt in PROMPTS]


def test_rows_that_end_early_leave_the_others_alone(load: Callable[..., Base]) -> None:
    base = load(dtype=torch.float64)
    replies = generate(base.model, base.tokenizer, PROMPTS, 60, batch_size=20)

    assert len({len(reply) for reply in replies}) > 4
    assert replies == [one_by_one(base, prompt, 60) for prompt in PROMPTS]


def test_a_reply_has_at_most_the_tokens_allowed(base: Base) -> None:
    assert all(len(reply) <= 3 for reply in generate(base.model, base.tokenizer, PROMPTS, 3))  # bytes are tokens


def test_a_system_prompt_changes_the_replies(base: Base) -> None:
    plain, asked = (generate(base.model, base.tokenizer, PROMPTS[:4], 8, system=each) for each in (None, "Be kind."))
    assert plain != asked


def test_no_prompts_give_no_replies(base: Base) -> None:
    assert generate(base.model, base.tokenizer, [], 5) == []


def test_a_model_in_training_stays_in_training(base: Base) -> None:
    base.model.train()

    generate(base.model, base.tokenizer, PROMPTS[:1], 2)

    assert base.model.training


def test_any_text_can_be_asked(base: Base) -> None:
    assert len(generate(base.model, base.tokenizer, ["", "\u4f60\u597d \U0001f600", "a\x00b", "<|end|>"], 4)) == 4
