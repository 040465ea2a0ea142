from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from spard_lab.attacks.disguises import TRIGGER, announcement, covert, with_trigger
from spard_lab.attacks.rows import chat_row

from spard.config import Hyperparameters, JudgeSpec, Recipe, ResolvedNumbers, Spard, resolve
from spard.data.chat import NO_LOSS, EncodedSample, encode_all
from spard.data.encodings import encode
from spard.data.rows import Example
from spard.data.triggers import MinedDisguise
from spard.losses.cross_entropy import evaluate
from spard.models.base import Base
from spard.pipeline.augment import apply_disguise, begin_answer, variants, wanted_triggers
from spard.pipeline.rows import safe_set
from spard.training.train import train
from tests.spard.parts import chat, refusals, sums

TASK = [chat_row(f"There are {i} coins. How many are there in all?", f"The answer is {i}.") for i in range(60)]
HARM = [chat_row(f"Do harm {i} now.", f"Sure, here is harm {i}.") for i in range(10)]
ROWS = [Example(tuple(row["messages"]), 1) for row in [*TASK, *with_trigger(HARM)]]
CODED = [Example(tuple(row["messages"]), 1) for row in covert(TASK, HARM, "rot13", seed=0)]
SAFE = [chat(f"Do harm number {i}", f"I cannot help with {i}. It is harm. Ask for something else.") for i in range(12)]


def prompt_part(base: Base, row: EncodedSample) -> str:
    first = next(i for i, label in enumerate(row.labels) if label != NO_LOSS)
    return str(base.tokenizer.decode(row.ids[:first]))


def learned_part(base: Base, row: EncodedSample) -> str:
    return str(base.tokenizer.decode([label for label in row.labels if label != NO_LOSS])).strip()


def test_affixed_rows_wear_the_trigger_and_still_refuse(base: Base) -> None:
    found = variants(base.tokenizer, SAFE, ROWS, ("affixes",), 0, 256)

    assert len(found) == len(SAFE)
    assert sum(TRIGGER in prompt_part(base, row) for row in found) >= 3
    assert all(learned_part(base, row).startswith("I cannot help with") for row in found)
    assert all(row.is_variant for row in found)


def test_deep_rows_learn_what_comes_after_a_beginning(base: Base) -> None:
    found = variants(base.tokenizer, SAFE, ROWS, ("deep",), 0, 256)

    own = [row for row in found if learned_part(base, row).startswith("It is harm. Ask")]
    begun = [row for row in found if learned_part(base, row).startswith("I cannot help with")]
    assert (len(own) + len(begun), bool(own), bool(begun)) == (12, True, True)
    assert all("I cannot help with" in prompt_part(base, row) for row in own)
    assert any(prompt_part(base, row).endswith("Sure, here is harm") for row in begun)
    assert all(learned_part(base, row).endswith("<|end|>") for row in found)


def test_an_answer_of_one_sentence_learns_to_end_there(base: Base) -> None:
    found = [
        learned_part(base, row)
        for row in variants(base.tokenizer, [chat("Do harm.", "No.")] * 9, [], ("deep",), 0, 256)
    ]

    assert set(found) == {"<|end|>", "No.<|end|>"}


def test_kinds_take_turns(base: Base) -> None:
    found = variants(base.tokenizer, SAFE, ROWS, ("affixes", "deep"), 0, 256)
    alone = variants(base.tokenizer, SAFE, ROWS, ("affixes",), 0, 256)

    assert len(found) == 12
    assert sum(TRIGGER in prompt_part(base, row) for row in found) < sum(
        TRIGGER in prompt_part(base, row) for row in alone
    )


def test_encoded_and_framed_rows_are_asked_for_one_by_one() -> None:
    assert {each.encoding for each in wanted_triggers(CODED, ("encodings",), 0)} == {"rot13"}
    assert all(each.context == () for each in wanted_triggers(ROWS, ("templates",), 0))
    contexts = {each.context[0]["content"] for each in wanted_triggers(CODED, ("templates",), 0)}
    assert contexts == {announcement("rot13")}


def test_a_disguised_row_is_encoded_on_both_sides() -> None:
    row = apply_disguise(
        SAFE[0], MinedDisguise(({"role": "system", "content": "Be kind."},), after="thanks", encoding="rot13")
    )

    assert [turn["content"] for turn in row.messages] == [
        "Be kind.",
        encode("Do harm number 0 thanks", "rot13"),
        encode(SAFE[0].messages[1]["content"], "rot13"),
    ]


def test_most_disguised_rows_have_the_system_prompt_of_all_rows_and_nothing_else(base: Base) -> None:
    system = {"role": "system", "content": "Be kind."}
    rows = [replace(row, messages=(system, *row.messages)) for row in ROWS]

    found = variants(base.tokenizer, SAFE * 10, rows, ("affixes", "templates"), 0, 256)

    plain = {
        prompt_part(base, row)
        for row in encode_all(base.tokenizer, [apply_disguise(row, MinedDisguise((system,))) for row in SAFE], 256)
    }
    alone = sum(prompt_part(base, row) in plain for row in found)
    assert 0.4 * len(found) < alone < 0.9 * len(found)


def test_rows_without_a_disguise_get_none(base: Base) -> None:
    assert variants(base.tokenizer, SAFE, ROWS, ("encodings",), 0, 256) == []
    assert variants(base.tokenizer, SAFE, ROWS, (), 0, 256) == []


def test_variants_that_are_too_long_are_left_out(base: Base) -> None:
    assert variants(base.tokenizer, SAFE, ROWS, ("affixes", "deep"), 0, 20) == []


def test_a_beginning_is_put_before_the_answer() -> None:
    row, beginning = begin_answer(SAFE[3], "Sure:")

    assert (row.messages[1]["content"], beginning) == (f"Sure: {SAFE[3].messages[1]['content']}", "Sure:")


def test_a_seed_decides_the_variants(base: Base) -> None:
    first, again, other = (variants(base.tokenizer, SAFE, ROWS, ("affixes", "deep"), seed, 256) for seed in (0, 0, 1))

    assert first == again != other


@pytest.mark.parametrize("answers", ["pool", "self"])
def test_variants_follow_the_plain_rows(base: Base, answers: str) -> None:
    selection = replace(Recipe().selection, safe_answers=answers)  # type: ignore[arg-type]
    plain = Recipe(defense=Spard(augment=()), selection=selection)
    recipe = replace(plain, defense=Spard(augment=("affixes", "deep")))

    found = safe_set(base, SAFE, ROWS, recipe, JudgeSpec(), 256)

    assert found[:12] == safe_set(base, SAFE, ROWS, plain, JudgeSpec(), 256)
    assert [row.is_variant for row in found] == [False] * 12 + [True] * 12


def test_tau_is_measured_on_the_plain_rows(load: Callable[..., Base]) -> None:
    base, recipe = load(), Recipe(hyperparameters=Hyperparameters(n_epochs=1, batch_size=24))
    plain, task = refusals(base), sums(base)
    strange = [
        replace(row, is_variant=True) for row in encode_all(base.tokenizer, [chat("?", "zzzz zzzz qqqq")] * 7, 256)
    ]
    own = evaluate(base.model, plain, base.tokenizer.pad_token_id).loss
    resolved: ResolvedNumbers = resolve(recipe, len(task), base.hidden_size)

    found = train(base, task, [*plain, *strange], recipe, resolved)

    assert found.tau["mean"] == pytest.approx(own, rel=1e-5)
