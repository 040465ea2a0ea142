"""Which rows of a training file are held out: near duplicates together, by a seed, few, and none of a small file."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from spard.data.held_out_rows import ASKED, AT_LEAST, MIN_ROWS, HeldOutRows, hold_out_rows, strip_templates
from spard.data.overlap import clusters

_WORDS = [f"word{i}" for i in range(3000)]
MOST = 100


def requests(count: int, seed: int = 0) -> list[str]:
    """Return requests that share nothing but some words."""
    drawn = random.Random(seed)
    return [" ".join(drawn.choices(_WORDS, k=12)) for _ in range(count)]


def split(texts: Sequence[str], most: int = MOST, seed: int = 1) -> HeldOutRows:
    return hold_out_rows(texts, range(len(texts)), most, seed)


@pytest.mark.parametrize(
    ("rows", "most", "held"), [(MIN_ROWS, MOST, AT_LEAST), (400, MOST, 20), (3000, MOST, MOST), (400, 3, 3)]
)
def test_a_small_share_is_held_out(rows: int, most: int, held: int) -> None:
    found = split(requests(rows), most)
    assert len(found.places) == held
    assert list(found.places) == sorted(set(found.places))
    assert len(set(found.asked)) == min(held, ASKED)
    assert set(found.asked) <= set(found.places)


def test_of_a_small_file_none_is_held_out_and_it_is_told_why() -> None:
    found = split(requests(MIN_ROWS - 1))
    assert (found.places, found.asked) == ((), ())
    assert f"fewer than {MIN_ROWS} rows" in found.why_none
    assert "validation file" in found.why_none


def test_rows_of_which_half_are_suspicious_have_some_held_out() -> None:
    """A support file of 60 rows, 33 of them suspicious to a model that refuses much, showed nothing of its task."""
    found = hold_out_rows(requests(60), range(27), MOST, 1, trained=60)
    assert len(found.places) == len(found.asked) == AT_LEAST
    assert set(found.places) <= set(range(27))


def test_no_row_is_held_out_where_nearly_all_are_suspicious() -> None:
    found = hold_out_rows(requests(60), range(4), MOST, 1, trained=60)
    assert found.places == ()
    assert "only 4 of the 60 rows to train on are not suspicious" in found.why_none


def test_the_same_seed_holds_out_the_same_rows_in_any_order_of_rows() -> None:
    texts = requests(200)
    shuffled = random.Random(5).sample(texts, len(texts))
    first = {texts[i] for i in split(texts).places}
    assert {shuffled[i] for i in split(shuffled).places} == first
    assert {texts[i] for i in split(texts, seed=2).places} != first


@pytest.mark.parametrize("seed", range(5))
def test_near_duplicates_are_held_out_together(seed: int) -> None:
    texts = [f"{before}{each}" for each in requests(60) for before in ("", "Please: ", "hello there ")]
    held = set(split(texts, seed=seed).places)
    labels = clusters(texts)
    assert held
    assert {labels[i] for i in held}.isdisjoint(labels[i] for i in range(len(texts)) if i not in held)


def test_a_short_request_goes_with_the_same_one_behind_a_greeting() -> None:
    short = [f"where is {word}?" for word in _WORDS[:40]]
    texts = [*short, *(f"Hi! {each}" for each in short)]
    held = split(texts).places
    assert held
    assert {i % 40 for i in held} == {i for i in held if i < 40}


def test_different_requests_are_asked_before_those_of_one_cluster() -> None:
    texts = [*requests(20), *(f"{before}{each}" for each in requests(30, seed=7) for before in ("", "Please: "))]
    asked = split(texts, seed=3).asked
    assert len({clusters(texts)[i] for i in asked}) == ASKED


def test_a_row_that_may_not_be_held_out_keeps_its_near_duplicates() -> None:
    texts = [*requests(60), *requests(60)]
    eligible = set(range(120)) - set(range(50))
    held = hold_out_rows(texts, eligible, MOST, 1).places
    assert held
    assert {i % 60 for i in held} <= set(range(50, 60))


def test_where_all_requests_are_alike_none_is_held_out_and_it_is_told_why() -> None:
    found = split(["Write a poem about the sea and the moon."] * 80)
    assert found.places == ()
    assert "nearly the same" in found.why_none


def test_an_instruction_around_each_request_makes_no_near_duplicates_of_them() -> None:
    before = "You are a classifier. Read the text below and answer with one of positive, negative or neutral. Text: "
    texts = [f"{before}{word} was fine. Answer with one word and nothing else, in lower case." for word in _WORDS[:80]]
    assert len(set(clusters(texts))) == 1
    assert len(split(texts).places) == AT_LEAST


def test_templates_are_cut_where_a_quarter_of_the_texts_have_them() -> None:
    template = "one two three four five six seven eight"
    texts = [f"{template} {word}" for word in _WORDS[:10]] + [f"other {word}" for word in _WORDS[:30]]
    assert strip_templates(texts) == [*_WORDS[:10], *(f"other {word}" for word in _WORDS[:30])]
    few = [f"{template} {word}" for word in _WORDS[:5]] + [f"other {word}" for word in _WORDS[:35]]
    assert strip_templates(few) == few
