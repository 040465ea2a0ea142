"""The pages that are made from the code are as the code has them now, and every error code is explained."""

from __future__ import annotations

import pytest

from tools import error_codes_page
from tools.references import DOCS, PAGES

# `tests/spard/test_chat_templates.py` compares that page, of whose table it has each cell before it.
ELSEWHERE = {"chat-templates.md"}


@pytest.mark.parametrize("name", [name for name in PAGES if name not in ELSEWHERE])
def test_a_page_is_current(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run python -m tools.references"


@pytest.mark.parametrize("place", ["requests", "jobs", "laboratory", "rows"])
def test_each_error_code_has_a_cause_and_a_cure_and_is_used(place: str) -> None:
    words = error_codes_page.read_explanations()[place]
    assert set(words) == error_codes_page.find_codes()[place], "cause and cure stand in app/help/error_codes.toml"
    assert all(len(text) > 8 and text.endswith(".") for pair in words.values() for text in pair)
