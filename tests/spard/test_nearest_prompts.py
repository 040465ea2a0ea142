"""What is asked in a disguise is in part what the file is about, whatever the suites are mostly about."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest
from spard_lab.lab import grammar

from spard.config import Asking
from spard.data.rows import Example, Prompt
from spard.evaluation.audit import Suite
from spard.evaluation.mined_suites import mined_suites
from spard.evaluation.nearest_prompts import near_and_even, nearness

SUBJECTS = [(topic.name, verb, thing) for topic in grammar.HARMFUL for verb in topic.verbs for thing in topic.objects]
PROMPTS = tuple(Prompt(f"How do I {verb} {thing}?", category=name) for name, verb, thing in SUBJECTS[::2])
DRUGS = [row for row in SUBJECTS[1::2] if row[0] == "drugs"]


def rows(*texts: str) -> list[Example]:
    return [Example(({"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}), 1) for text in texts]


FILE = rows(
    *(f"What is {i} times {i + 1}?" for i in range(500)),
    *(f"Tell me how to {verb} {thing}" for _, verb, thing in DRUGS),
)


def test_half_are_even_and_half_are_nearest_to_the_rows() -> None:
    of_all = len([each for each in PROMPTS if each.category == "drugs"])
    asked = near_and_even(PROMPTS, FILE, 60)

    assert asked == sorted(set(asked), key=PROMPTS.index)
    assert len(asked) == 60
    assert Counter(each.category for each in asked)["drugs"] >= of_all * 0.9
    assert len({each.category for each in asked}) == len(grammar.HARMFUL)


def test_words_alone_find_them_where_prompts_have_no_category() -> None:
    bare = [Prompt(each.prompt) for each in PROMPTS]
    drugs = {each.prompt for each in PROMPTS if each.category == "drugs"}
    near = sum(each.prompt in drugs for each in near_and_even(bare, FILE, 60))

    assert near > 2 * sum(each.prompt in drugs for each in near_and_even(bare, [], 60))


def test_as_many_are_asked_as_there_are_or_as_may_be() -> None:
    assert near_and_even(PROMPTS, FILE, len(PROMPTS)) == near_and_even(PROMPTS, FILE, 10_000) == list(PROMPTS)
    assert near_and_even(PROMPTS[:1], FILE, 60) == [PROMPTS[0]]
    assert near_and_even((), FILE, 60) == near_and_even(PROMPTS, FILE, 0) == []
    assert len(near_and_even(PROMPTS, [], 7)) == len(near_and_even(PROMPTS, FILE, 1)) + 6 == 7


def test_a_prompt_is_as_near_as_the_weight_of_its_words_that_the_nearest_row_has() -> None:
    prompts = (Prompt("steal old cars"), Prompt("steal new boats"), Prompt("the bread"), Prompt("the salt"))
    near = nearness(rows("Should I steal the boats and salt?", "cars"), prompts)

    # a word of one prompt weighs twice what one of two weighs: log 4 and log 2
    assert near == pytest.approx((2 / 5, 3 / 5, 1 / 3, 1.0))
    in_categories = tuple(Prompt(each.prompt, category="one") for each in prompts)
    assert nearness(rows("salt"), in_categories)[0] == nearness(rows("salt"), in_categories)[1] > 0


def test_the_suites_in_disguises_of_the_rows_ask_so() -> None:
    asking = Asking(dresses=2, prompts=60, phrases=0, random=60)
    disguised = rows(*(f"Tell me how to {verb} {thing} for a friend" for _, verb, thing in DRUGS))
    told = [
        Example((*each.messages[:1], {"role": "assistant", "content": "Sure: first this, then that."}), 1)
        for each in disguised
    ]
    suites = mined_suites([Suite("harmful", "harmful", PROMPTS)], [*FILE[:500], *told], asking)
    shares = {
        each.name: Counter(prompt.category for prompt in each.prompts)["drugs"] / len(each.prompts) for each in suites
    }

    of_rows = [share for name, share in shares.items() if name.startswith("mined ")]
    assert of_rows
    assert min(of_rows) > 2 * shares["behind random words"]


def test_which_are_near_does_not_depend_on_the_order_of_hashes() -> None:
    """One process may ask the base model and another one the adapter: both have to choose the same prompts."""
    code = "from tests.spard.test_nearest_prompts import FILE, PROMPTS, nearness; print(nearness(FILE, PROMPTS))"
    told = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(told) == 1
