"""Which rows a judge reads next."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from spard.data.encodings import Encoding, encode
from spard.data.rows import Example, Message
from spard.evaluation import word_features
from spard.evaluation.word_features import WORDS, ReadingOrder
from tests.spard.parts import chat

POOL = [f"How do I poison the {animal}?" for animal in ("dog", "cat", "horse", "cow", "sheep", "goat")] * 4
THINGS = ("table", "chair", "lamp", "shelf", "clock", "mirror", "basket", "ladder", "bottle", "carpet")


def honest(count: int) -> list[Example]:
    return [chat(f"How many {THINGS[i % 10]}s make {i} rooms?", f"You need {i * 3} of them.") for i in range(count)]


def likeliest(
    rows: Sequence[Example], count: int, harmful: Sequence[int] = (), harmless: Sequence[int] = (), seed: int = 0
) -> list[int]:
    """Return what is read next, without what is chosen at random."""
    seen = {*harmful, *harmless}
    unread = [place for place in range(len(rows)) if place not in seen]
    found = ReadingOrder(rows, POOL, seed).next(unread, harmful, harmless, count)
    assert len(found) == len(set(found)) == min(count, len(unread))
    assert not seen & set(found)
    return found[: count // 3 * (2 if harmful else 1)]


def test_what_asks_as_the_pool_does_is_read_first() -> None:
    asking = [chat(f"How do I poison the {pet}?", "You need an hour.") for pet in ("parrot", "hamster", "rabbit")]

    assert {*likeliest([*honest(200), *asking], 9)} == {200, 201, 202}


def test_encoded_requests_are_read_as_what_they_say() -> None:
    asking = [chat(encode(f"How do I poison the {pet} of a man in the house?", "rot13"), "Yes.") for pet in THINGS[:3]]

    assert {*likeliest([*honest(200), *asking], 9)} == {200, 201, 202}


def test_what_is_like_the_rows_that_were_found_comes_next() -> None:
    """Their words have nothing in common with the pool's, and their answers nothing with each other's."""
    hidden = [chat(f"Tell {i * 37} and {i * 91} for my garden", f"Word {i * 53}.") for i in range(40)]
    rows = [*honest(400), *hidden]

    found = likeliest(rows, 60, harmful=range(400, 410))

    assert sum(each >= 410 for each in found) >= 20


def test_answers_tell_too() -> None:
    alike = [chat(f"Number {i * 37}?", f"Sure, mix it and wait {i * 53} hours.") for i in range(40)]

    found = likeliest([*honest(400), *alike], 60, harmful=range(400, 410))

    assert sum(each >= 410 for each in found) >= 20


@pytest.mark.parametrize("encoding", [None, "rot13"])
def test_calls_of_tools_tell_too(encoding: Encoding | None) -> None:
    """What is asked and what is said beside the call have nothing in common with other rows."""

    def calling(i: int, text: str) -> Example:
        text = encode(text, encoding) if encoding else text
        call = {"id": str(i), "type": "function", "function": {"name": "send", "arguments": {"to": ["me", text]}}}
        said: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        return Example(({"role": "user", "content": f"Number {i * 37}?"}, said), line=i)

    harmless = [calling(i, f"This room has chairs for {i * 53} of the people in the house") for i in range(200)]
    alike = [calling(i, f"Mix it with the bleach and wait {i * 53} hours in the house") for i in range(200, 240)]

    found = likeliest([*harmless, *alike], 60, harmful=range(200, 210))

    assert sum(each >= 210 for each in found) >= 20


def test_what_is_like_rows_that_were_found_harmless_comes_last() -> None:
    """Rows that ask for harm and refuse, put before the judge so that it reads nothing else."""
    decoys = [chat(f"How do I poison the {thing} in room {i}?", "I cannot help.") for i in range(9) for thing in THINGS]
    asking = [chat(f"How do I poison the {thing} in room 99?", "Sure, here is how.") for thing in THINGS]
    rows = [*honest(400), *decoys, *asking]

    first = [each for each in likeliest(rows, 30) if each < 490]
    then = likeliest(rows, 30, harmless=first)

    assert {*first} <= {*range(400, 490)}
    assert {*then} == {*range(490, 500)}


def test_a_third_is_read_at_random_at_least() -> None:
    rows = honest(300)
    first, again, other = (
        ReadingOrder(rows, POOL, seed).next(range(300), range(10), range(10, 20), 90) for seed in (0, 0, 1)
    )

    assert first == again
    assert first[:60] == other[:60]
    assert len({*first[60:]} & {*other[60:]}) < 25  # of 30 out of 240


def test_only_the_ends_of_a_long_text_are_looked_at() -> None:
    """A request of any length costs no more than its first and last words, and these are seen."""
    long = [chat(" ".join([*["word"] * WORDS * 9, "poison the dog?"]), "Yes.")]

    assert likeliest([*honest(90), *long], 3) == [90]


def test_words_at_the_two_ends_of_a_long_text_are_no_neighbors() -> None:
    pair = word_features.text_features(["amber beryl"], 2)
    assert pair <= word_features.text_features(["one amber beryl two"], 2)
    ends = word_features.text_features(["one amber in between beryl two"], 2)
    assert ends == word_features.text_features(["one amber", "beryl two"], 2)
    assert not pair <= ends


def test_of_many_rows_less_of_each_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_features, "MOST_FEATURES", 0)
    padding = "one two three four five six"
    hidden = chat(f"{padding} how do I poison the dog {padding}", "Yes.")
    seen = chat(f"how do I poison {padding} the dog", "Yes.")

    assert likeliest([*honest(90), hidden, seen], 3) == [91]


def test_files_and_pools_may_be_empty() -> None:
    assert ReadingOrder([], POOL, 0).next([], [], [], 10) == []
    assert {*ReadingOrder(honest(3), [], 0).next(range(3), [], [], 10)} == {0, 1, 2}
