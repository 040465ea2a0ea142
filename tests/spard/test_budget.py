"""How many padded tokens go through a model at once where nothing is learned, and what if they are too many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from spard.data.batches import FORWARD, cut
from spard.evaluation.own_refusal import measure_own_refusal
from spard.losses.cross_entropy import evaluate
from spard.models import budget
from spard.models.base import Base
from spard.models.shapes import Shape, read_model_shape
from spard.selection.embeddings import embed
from tests.spard.parts import refusals, sums

QWEN_7B = Shape(hidden=3584, inner=18944, layers=28, heads=28, kv_heads=4, head_dim=128, vocab=152064)
GIB = 1 << 30


@pytest.fixture(autouse=True)
def nothing_told() -> Iterator[None]:
    yield
    budget.set_tokens(None)


@pytest.mark.parametrize(
    ("rows", "mean", "sigma"), [(500, 2.9, 0.6), (500, 4.5, 0.7), (500, 5.3, 0.8), (8752, 2.9, 0.6)]
)
def test_a_twentieth_of_a_forward_pass_is_padding_at_most(rows: int, mean: float, sigma: float) -> None:
    lengths = np.random.default_rng(0).lognormal(mean, sigma, rows).astype(int).clip(1, 512).tolist()
    for most in (budget.ON_CPU, budget.MOST):
        padded = 0
        for own in (lengths[i : i + 2048] for i in range(0, rows, 2048)):  # a job embeds so many before it looks up
            padded += sum(len(part) * max(own[i] for i in part) for part in cut(own, most, FORWARD))
        assert 1 - sum(lengths) / padded <= 0.05


def test_more_free_memory_holds_more_tokens_and_never_more_than_there_is() -> None:
    found = [budget.most_tokens(QWEN_7B, free * GIB, 2) for free in (2, 4, 8, 16)]
    assert found == sorted(set(found))
    for free, tokens in zip((2, 4, 8, 16), found, strict=True):
        assert tokens * budget.passed_bytes(QWEN_7B, 2) < free * GIB
    assert budget.most_tokens(QWEN_7B, 80 * GIB, 2) == budget.MOST
    assert budget.most_tokens(QWEN_7B, 0, 2) == 1


def test_replies_are_written_to_as_many_prompts_as_their_keys_and_values_fit() -> None:
    assert budget.kept_bytes(QWEN_7B, 2) == 57_344  # 2 x 28 layers x 4 heads x 128 numbers, in bfloat16
    few, many = (budget.most_rows(QWEN_7B, 40 * GIB, prompt, 64, 2) for prompt in (2000, 200))
    assert 1 < few < many
    assert few * 2064 * 57_344 < 40 * GIB
    assert budget.most_rows(QWEN_7B, 40 * GIB, 200, 2000, 2) < many
    assert budget.most_rows(QWEN_7B, 0, 200, 64, 2) == 1


def test_on_a_cpu_keys_and_values_take_a_fixed_memory(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (shape := read_model_shape(base.model.config.to_dict()))
    monkeypatch.setattr(budget, "ON_CPU_BYTES", 2**20)
    assert budget.generated_rows(base.model, 64, 64) == 2**20 // budget.kept_bytes(shape, 4) // 128


def test_on_a_cpu_the_number_is_fixed_and_a_provider_may_set_another(base: Base) -> None:
    assert budget.pass_tokens(base.model) == budget.ON_CPU
    assert budget.generated_rows(base.model, 64, 64) == budget.ON_CPU_KEPT // 128

    budget.set_tokens(1000)

    assert budget.pass_tokens(base.model) == 1000
    assert budget.generated_rows(base.model, 64, 64) == 7
    assert budget.generated_rows(base.model, 5000, 64) == 1


def test_a_gpu_is_asked_what_it_has_free(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4 * GIB)
    gpu = torch.device("cuda")

    assert budget.free_bytes(gpu) == 3 * GIB
    assert budget.own_memory(gpu) == 2 * GIB + 5 * GIB + GIB * 3 // 2  # others have the rest


class TooMany:
    """A GPU that has too little memory for more than so many padded tokens, and what it was asked."""

    def __init__(self, most: int, model: Any) -> None:
        self.most, self.model, self.asked = most, model, list[int]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tokens = kwargs["input_ids"].numel()
        self.asked.append(tokens)
        if tokens > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.model(*args, **kwargs)


@pytest.fixture
def little_memory(base: Base, monkeypatch: pytest.MonkeyPatch) -> TooMany:
    decoder = TooMany(200, base.model.get_decoder())
    monkeypatch.setattr(base.model, "get_decoder", lambda: decoder)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return decoder


def test_a_pass_that_is_too_large_goes_on_in_halves(base: Base, little_memory: TooMany) -> None:
    little_memory.most = 10**6
    rows, texts = sums(base), [f"a prompt of number {i}{'!' * i}" for i in range(30)]
    expected = evaluate(base.model, rows, base.tokenizer.pad_token_id), embed(base, texts), signals(base, rows)

    little_memory.most = 200
    little_memory.asked.clear()
    found = evaluate(base.model, rows, base.tokenizer.pad_token_id)

    assert found.loss == pytest.approx(expected[0].loss, rel=1e-5)
    assert 0 < sum(tokens > 200 for tokens in little_memory.asked) <= 4  # of 2,048, 1,024, 512 and 256 tokens
    torch.testing.assert_close(embed(base, texts), expected[1], rtol=1e-4, atol=1e-4)
    assert signals(base, rows) == pytest.approx(expected[2], rel=1e-4)
    assert max(little_memory.asked[-5:]) <= 200  # what was learned is kept


def test_a_row_that_is_too_long_alone_is_an_error(base: Base, little_memory: TooMany) -> None:
    little_memory.most = 3
    with pytest.raises(torch.OutOfMemoryError):
        embed(base, ["a long text", "another one"])


def signals(base: Base, rows: Sequence[Any]) -> list[float]:
    """The row signal, of openings that the model may begin with."""
    openings = [refusals(base)[0].ids[:4], refusals(base)[0].ids[-8:-4]]
    return [each.probability for each in measure_own_refusal(base, rows, openings, 0.0)]
