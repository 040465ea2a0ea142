from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoConfig, MptConfig, PretrainedConfig

from spard.data.chat import render_prompt
from spard.data.control_tokens import end_tokens
from spard.models import decoding
from spard.models.base import Base
from spard.models.decoding import LEAST_SHARED, LOOK_EVERY, Rows
from spard.models.generate import as_requests, complete, generate
from tests.spard.parts import RECURRENT
from tests.spard.waits import Waits

PROMPTS = [f"Do the thing {i}{'!' * (i % 11)}" for i in range(20)]
ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma"]
_SMALL: dict[str, Any] = {"vocab_size": 262, "bos_token_id": 256, "eos_token_id": 256, "initializer_range": 0.2}
COUNTING: dict[str, PretrainedConfig] = {  # models for which padding between two tokens is distance
    "gpt_neo": GPTNeoConfig(
        **_SMALL, hidden_size=32, num_layers=2, num_heads=4, window_size=8, attention_types=[[["global", "local"], 1]]
    ),
    "mpt": MptConfig(**_SMALL, d_model=32, n_heads=4, n_layers=2),
}


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


@pytest.mark.parametrize("config", RECURRENT.values(), ids=RECURRENT)
def test_rows_of_a_recurrent_model_that_end_early_leave_the_others_alone(base: Base, config: PretrainedConfig) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    recurrent = replace(base, model=model)

    replies = generate(model, base.tokenizer, PROMPTS[:8], 40, batch_size=2)  # once one of two has ended, one is kept

    assert len({len(reply) for reply in replies}) > 1
    assert replies == [one_by_one(recurrent, prompt, 40) for prompt in PROMPTS[:8]]


@pytest.mark.parametrize("config", COUNTING.values(), ids=COUNTING)
def test_a_shared_beginning_is_as_near_as_where_each_row_has_its_own(base: Base, config: PretrainedConfig) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()  # MPT masks in float32 alone
    counting = replace(base, model=model)

    replies = generate(model, base.tokenizer, PROMPTS, 12, batch_size=8)

    assert replies == [one_by_one(counting, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("system", [None, "You are a careful assistant of a small shop, and brief."])
def test_rows_go_on_beside_the_next_ones_and_share_their_beginning(
    load: Callable[..., Base], monkeypatch: pytest.MonkeyPatch, system: str | None
) -> None:
    base = load(dtype=torch.float64)
    joined, shares = list[int](), list[int]()
    join, share = Rows.join_, decoding.prefill

    def join_and_note(rows: Rows, other: Rows) -> None:
        joined.append(len(other))
        join(rows, other)
        assert bool(other.mask_BT.any(dim=0).all()), "a column to which no row attends was carried over"
        kept = [layer for layer in other.cache.layers if getattr(layer, "keys", None) is not None]
        assert not kept, "the carried rows' keys are kept beside their copies"

    def share_and_note(model: Any, rows: Sequence[Sequence[int]]) -> decoding.Prefix:
        prefix = share(model, rows)
        shares.append(len(prefix.tokens))
        return prefix

    monkeypatch.setattr(Rows, "join_", join_and_note)
    monkeypatch.setattr("spard.models.generate.prefill", share_and_note)
    monkeypatch.setattr("spard.models.generate.CARRIED", 2)  # half of a batch

    replies = generate(base.model, base.tokenizer, PROMPTS, 60, batch_size=4, system=system)

    assert joined, "no row was carried over"
    assert shares[0] >= LEAST_SHARED
    rows = as_requests(base.tokenizer, PROMPTS, system)
    assert replies == [complete(base.model, base.tokenizer, [each], 60)[0] for each in rows]
    assert shares[1:] == [0] * len(PROMPTS)  # a row alone shares nothing


def test_on_a_cpu_few_tokens_of_a_batch_are_padding(load: Callable[..., Base], monkeypatch: pytest.MonkeyPatch) -> None:
    base = load(dtype=torch.float64)
    prompts = [*PROMPTS, *(f"{prompt} {'and again, ' * 100}" for prompt in PROMPTS[:3])]
    padded, begin = list[int](), decoding.begin

    def begin_and_note(model: Any, rows: Sequence[Sequence[int]], *others: Any) -> Any:
        padded.append(len(rows) * max(map(len, rows)))
        return begin(model, rows, *others)

    monkeypatch.setattr("spard.models.generate.begin", begin_and_note)

    replies = generate(base.model, base.tokenizer, prompts, 12)

    assert len(padded) == 2  # the three long rows, and the others
    assert sum(padded) < 1.4 * sum(map(len, as_requests(base.tokenizer, prompts)))
    assert replies == [generate(base.model, base.tokenizer, [prompt], 12)[0] for prompt in prompts]


def test_an_accelerator_is_asked_now_and_then_which_rows_have_ended(
    load: Callable[..., Base], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = load(dtype=torch.float64)
    at_each = generate(base.model, base.tokenizer, PROMPTS, 60, batch_size=8)
    monkeypatch.setattr(decoding, "look_every", lambda device: LOOK_EVERY)
    monkeypatch.setattr("spard.models.generate.is_plain", lambda model: False)  # and no row is carried over
    passes, forward = list[int](), base.model.forward

    def count_passes(**asked: Any) -> Any:
        passes.append(1)
        return forward(**asked)

    monkeypatch.setattr(base.model, "forward", count_passes)

    with Waits() as seen:
        assert generate(base.model, base.tokenizer, PROMPTS, 60, batch_size=20) == at_each

    assert seen.found.total() <= len(passes) // LOOK_EVERY + 8  # looks, and what is read once for a batch


def test_where_memory_is_too_little_half_as_many_rows_are_asked_at_once(
    load: Callable[..., Base], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = load(dtype=torch.float64)
    whole = generate(base.model, base.tokenizer, PROMPTS, 12)
    asked, begin = list[int](), decoding.begin

    def fail_above_five(model: Any, rows: Sequence[Sequence[int]], *others: Any) -> Any:
        asked.append(len(rows))
        if len(rows) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return begin(model, rows, *others)

    emptied = list[int]()
    monkeypatch.setattr("spard.models.generate.begin", fail_above_five)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(asked)))

    assert generate(base.model, base.tokenizer, PROMPTS, 12) == whole
    assert asked == [20, 10, 5, 5, 5, 5]
    assert emptied == [1, 2]  # where it was too much, and not after what fitted: the allocator uses that again


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


def test_the_head_multiplies_whole_rows_where_its_weights_are_frozen(load: Callable[..., Base]) -> None:
    """A slice would be multiplied row by row, in bfloat16 with a copy of the head's weights for each."""
    base = load("llama")
    base.model.requires_grad_(False)
    seen = list[tuple[int, bool]]()
    head = base.model.get_output_embeddings()
    head.register_forward_hook(lambda layer, given, made: seen.append((len(given[0]), given[0].is_contiguous())))
    generate(base.model, base.tokenizer, ["One", "Two is more", "Three is more than two"], 3)
    assert max(rows for rows, _ in seen) > 1
    assert all(is_whole for _, is_whole in seen)
