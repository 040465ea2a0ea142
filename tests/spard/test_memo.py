from __future__ import annotations

from collections.abc import Sequence

from spard.data.rows import Example, keep_last


def rows(*texts: str) -> list[Example]:
    return [Example(({"role": "user", "content": text},), line) for line, text in enumerate(texts)]


def test_the_same_rows_are_looked_at_once_and_others_anew() -> None:
    asked = list[int]()

    @keep_last
    def longest(rows: Sequence[Example]) -> int:
        asked.append(len(rows))
        return max(len(row.messages[0]["content"]) for row in rows)

    some = rows("a", "bbb")
    found = [longest(some), longest(list(some)), longest(some[:1]), longest(some), longest(rows("a", "bbbb"))]
    assert found == [3, 3, 1, 3, 4]
    assert asked == [2, 1, 2, 2]


def test_rows_that_were_added_to_a_list_are_seen() -> None:
    @keep_last
    def count(rows: Sequence[Example]) -> int:
        return len(rows)

    some = rows("a")
    first = count(some)
    some += rows("b")
    assert (first, count(some)) == (1, 2)


def test_another_question_of_the_same_rows_is_answered_anew() -> None:
    @keep_last
    def beginning(rows: Sequence[Example], with_what: str = "") -> list[bool]:
        return [row.messages[0]["content"].startswith(with_what) for row in rows]

    some = rows("a", "b")
    assert [beginning(some, "a"), beginning(some, "b"), beginning(some)] == [[True, False], [False, True], [True] * 2]
