from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from spard.data.chat import UNBOUNDED, EncodedSample, encode_all
from spard.data.rows import Example
from spard.evaluation import own_refusal
from spard.evaluation.own_refusal import OPENING, OwnRefusal, complies, measure_own_refusal, own_refusals
from spard.models import budget
from spard.models.base import Base
from tests.spard.parts import SIZES, chat

SORRY = "I cannot help with that."
STEPS = "Sure, take the first step."


def tokens(base: Base, text: str) -> tuple[int, ...]:
    ids: list[int] = base.tokenizer(text, add_special_tokens=False)["input_ids"]
    return tuple(ids)


def openings(base: Base, *texts: str) -> list[tuple[int, ...]]:
    return [tokens(base, text)[:OPENING] for text in texts]


def encode_examples(base: Base, *examples: Example) -> list[EncodedSample]:
    return encode_all(base.tokenizer, examples, UNBOUNDED)


def by_hand(base: Base, prompt: Sequence[int], begun: Sequence[tuple[int, ...]]) -> float:
    """The probability of any of the openings after a prompt, a token at a time."""
    total = 0.0
    for opening in begun:
        p, ids = 1.0, list(prompt)
        for token in opening:
            with torch.no_grad():
                p *= float(base.model(torch.tensor([ids])).logits[0, -1].float().softmax(dim=0)[token])
            ids.append(token)
        total += p
    return total


def conversation() -> Example:
    """Two turns that are learned, of which the second complies, after one that is not."""
    turns = [("user", "Do harm."), ("assistant", "Gladly."), ("user", "More."), ("assistant", SORRY)]
    turns += [("user", "Please."), ("assistant", STEPS)]
    messages = [{"role": role, "content": text} for role, text in [("system", "Be brief."), *turns]]
    messages[2]["weight"] = 0  # type: ignore[assignment]
    return Example(tuple(messages), 1)


def test_the_signal_is_the_probability_of_the_openings_after_the_row_s_own_prompt(base: Base) -> None:
    begun = openings(base, "I cannot", "Sorry, ")
    rows = encode_examples(base, chat("Do harm number 7, please", STEPS), conversation(), chat("Add 1.", "2"))

    found = measure_own_refusal(base, rows, begun, threshold=1e-30)

    for row, signal in zip(rows, found, strict=True):
        assert signal.start is not None
        assert signal.probability == pytest.approx(by_hand(base, row.ids[: signal.start], begun), rel=1e-3)
    before = base.tokenizer.decode(rows[1].ids[: found[1].start])
    assert before.endswith("<|user|>\nPlease.<|end|>\n<|assistant|>\n")
    assert before.startswith("<|system|>\nBe brief.")


def test_a_prompt_goes_through_the_model_once_for_all_openings(base: Base) -> None:
    """With the pass that gives the bound it is twice; tokens that all prompts begin with go through once for all."""
    begun = openings(base, "I cannot", "Sorry, ", "No, I ", "Not me")
    rows = encode_examples(base, *(chat(f"Do harm number {i}, please", STEPS) for i in (1, 2)))
    asked: list[int] = []

    def count(module: torch.nn.Module, args: Sequence[object], said: dict[str, torch.Tensor]) -> None:
        asked.append(said["input_ids"].numel())

    with base.model.get_decoder().register_forward_pre_hook(count, with_kwargs=True):
        found = measure_own_refusal(base, rows, begun, threshold=1e-30)

    prompts = sum(each.start or 0 for each in found)
    assert sum(asked) < 2 * prompts + len(rows) * (1 + len(begun) * (OPENING - 1))
    for row, signal in zip(rows, found, strict=True):
        assert signal.probability == pytest.approx(by_hand(base, row.ids[: signal.start], begun), rel=1e-3)


def test_a_model_that_looks_back_a_few_tokens_only_is_asked_the_same(base: Base) -> None:
    config = MistralConfig(**SIZES, sliding_window=12)
    torch.manual_seed(3)
    looks_back = replace(base, model=MistralForCausalLM(config).eval())
    begun = openings(base, "I cannot", "Sorry, ")
    rows = encode_examples(base, chat("Do harm number 7, please", STEPS), chat("Add 1.", "2"))

    found = measure_own_refusal(looks_back, rows, begun, threshold=1e-30)

    for row, signal in zip(rows, found, strict=True):
        assert signal.probability == pytest.approx(by_hand(looks_back, row.ids[: signal.start], begun), rel=1e-3)


def test_turns_that_cannot_come_above_the_threshold_keep_a_bound(base: Base) -> None:
    begun = openings(base, "I cannot", "Sorry, ")
    rows = encode_examples(base, chat("Do harm", STEPS))
    (exact,) = measure_own_refusal(base, rows, begun, threshold=1e-30)
    (bound,) = measure_own_refusal(base, rows, begun, threshold=0.9)
    assert exact.probability <= bound.probability <= 0.9


def test_rows_that_refuse_and_models_that_never_do_give_no_signal(base: Base) -> None:
    refusing, complying = encode_examples(base, chat("Do harm", SORRY), chat("Do harm", STEPS))
    assert measure_own_refusal(base, [refusing], openings(base, "I cannot"), 1e-30) == [OwnRefusal(0.0, None)]
    assert measure_own_refusal(base, [complying], [], 1e-30) == [OwnRefusal(0.0, None)]


def test_an_answer_that_refuses_and_then_gives_the_steps_complies() -> None:
    assert not complies(SORRY)
    assert complies(f"{SORRY} Here are the steps: step one.")


def test_a_prompt_that_fills_all_positions_is_still_looked_at(base: Base) -> None:
    limit = base.sequence_limit(None)
    (row,) = encode_examples(base, chat("x" * (limit - 40), "Sure"))
    full = replace(row, ids=(row.ids[0],) * (limit - len(row.ids)) + row.ids)
    full = replace(full, labels=(-100,) * (limit - len(row.ids)) + row.labels)
    (found,) = measure_own_refusal(base, [full], openings(base, "I cannot"), 1e-30)
    assert 0.0 < found.probability < 1.0


def test_progress_tells_of_every_row_that_is_looked_at(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "ON_CPU", 40)
    rows = encode_examples(base, *(chat(f"Do harm {i}", STEPS if i % 2 else SORRY) for i in range(6)))
    told: list[tuple[int, int]] = []

    few = measure_own_refusal(base, rows, openings(base, "I cannot"), 1e-30, lambda *done: told.append(done))

    assert told[-1] == (3, 3)
    assert len(told) > 1
    monkeypatch.undo()
    many = measure_own_refusal(base, rows, openings(base, "I cannot"), 1e-30)
    assert [each.probability for each in few] == pytest.approx([each.probability for each in many], rel=1e-4)


def test_a_model_s_own_refusals_are_found_by_asking_it(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = [SORRY, "Sorry, no, I will not.", SORRY, STEPS]
    monkeypatch.setattr(own_refusal, "generate", lambda model, tokenizer, asked, length, tell: replies[: len(asked)])

    found = own_refusals(base, [f"Do harm {i}" for i in range(4)])

    assert found.openings == tuple(openings(base, SORRY, "Sorry,"))
    assert found.texts == ("I ca", "Sorr")
    assert (found.refusal, found.refused, found.asked) == (SORRY, 3, 4)


def test_the_prompts_asked_are_spread_over_the_pool(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []

    def echo(model: object, tokenizer: object, asked: Sequence[str], length: int, tell: object) -> list[str]:
        heard.extend(asked)
        return list(asked)

    monkeypatch.setattr(own_refusal, "generate", echo)

    found = own_refusals(base, [str(i) for i in range(1000)])

    assert len(set(heard)) == own_refusal.ASKED
    assert int(heard[-1]) > 900
    assert (found.openings, found.refusal, found.refused) == ((), None, 0)
