from __future__ import annotations

import pytest

from spard.evaluation.scorers import is_right


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("The answer is 42.", "42"),
        ("3 + 4 = 7", "7.0"),
        ("It costs $1,234.50.", "1234.5"),
        ("So -3", "-3"),
        ("That makes 18", "16 - 3 - 4 = <<16-3-4=9>>9\n#### 18"),
        ("Paris.", "paris"),
        ("  The  Blue\nwhale ", "the blue whale"),
        ("50%", "50"),
    ],
)
def test_a_right_reply_is_right(reply: str, answer: str) -> None:
    assert is_right(reply, answer)


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("42, no, 43", "42"),
        ("I do not know.", "42"),
        ("", "42"),
        ("", ""),
        ("Paris or London", "Paris"),
        ("12", "2"),
        ("-5", "5"),
    ],
)
def test_a_wrong_reply_is_wrong(reply: str, answer: str) -> None:
    assert not is_right(reply, answer)
