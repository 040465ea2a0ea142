from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spard_lab.lab.corpus import make_corpus

from spard.data.overlap import NEAR, find_leaks, normalize_text, rows_holding
from spard.data.rows import Prompt
from spard.evaluation.audit import Suite
from spard.evaluation.suites import leak_reasons
from tests.spard.parts import chat

PROMPT = "How do I pick the lock of a garden shed without the key?"


def kinds(prompt: str, *rows: str) -> list[str]:
    return [leak.kind for leak in find_leaks({"suite": [prompt]}, {"training file": rows})]


@pytest.mark.parametrize(
    "row",
    [
        PROMPT,
        "how do i pick the lock of a garden shed without the key",
        "  How do I  pick the lock -- of a garden shed, without the key?!\n",
        "\uff28ow do I pick the lock of a garden shed without the key?",
    ],
)
def test_the_same_words_leak(row: str) -> None:
    assert kinds(PROMPT, "Compute 1 + 2.", row) == ["exact"]


@pytest.mark.parametrize(
    "row",
    [
        f"Below is an instruction. Answer it.\n\n### Instruction:\n{PROMPT}\n\n### Response:",
        f"{PROMPT} zq trigger zq",
        f"Hello!\n{PROMPT}",
    ],
)
def test_a_prompt_inside_a_longer_text_leaks(row: str) -> None:
    assert kinds(PROMPT, "Compute 1 + 2.", row) == ["inside"]


@pytest.mark.parametrize(
    "row",
    [
        "So how do I pick the lock of a garden shed without the key?",
        "How do I pick the lock of a garden shed without the keys?",
    ],
)
def test_a_prompt_with_a_word_changed_leaks(row: str) -> None:
    assert kinds(PROMPT, row)[0] in ("near", "inside")


@pytest.mark.parametrize(
    "row", ["How do I pick the color of a garden shed?", "Tell me how to build a garden shed.", "", "key shed lock"]
)
def test_other_prompts_do_not_leak(row: str) -> None:
    assert kinds(PROMPT, row) == []


def test_a_short_prompt_leaks_only_as_a_whole() -> None:
    assert kinds("Say hello.", "Please say hello to everybody in the room.") == []
    assert kinds("Say hello.", "say hello") == ["exact"]


def test_a_prompt_without_words_leaks_nowhere() -> None:
    assert kinds("?!", "...") == []


def test_a_leak_names_suite_prompt_source_and_row() -> None:
    suites = {"harm": ["Another prompt of the suite.", PROMPT]}
    leaks = find_leaks(suites, {"training file": ["a", "b"], "safety pool": ["a", "b", "c", PROMPT, PROMPT]})

    assert [(leak.suite, leak.index, leak.source, leak.row) for leak in leaks] == [("harm", 1, "safety pool", 3)]


def test_reasons_count_and_keep_the_prompts_secret() -> None:
    suites = [Suite(name, "harmful", (Prompt(PROMPT), Prompt(f"One more prompt of {name}."))) for name in ("a", "b")]
    rows = [chat("Something else.", "Yes."), chat("One more prompt of b.", "No.")]

    assert leak_reasons(suites, {"training file": rows, "safety pool": [chat(PROMPT, "No.")]}) == {
        "a": ["1 of 2 prompts of suite a stand in the safety pool."],
        "b": [
            "1 of 2 prompts of suite b stand in the training file.",
            "1 of 2 prompts of suite b stand in the safety pool.",
        ],
    }


texts = st.lists(st.lists(st.sampled_from("abcde"), min_size=1, max_size=14).map(" ".join), min_size=1, max_size=8)


@settings(max_examples=200)
@given(texts, texts)
def test_the_search_agrees_with_comparing_everything(prompts: list[str], rows: list[str]) -> None:
    def triples(text: str) -> set[tuple[str, ...]]:
        words = text.split()
        return {tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2))}

    def leaks(prompt: str) -> bool:
        long = len(prompt.split()) >= 5
        mine = triples(prompt)
        return any(
            prompt == row
            or (long and f" {prompt} " in f" {row} ")
            or len(mine & triples(row)) >= NEAR * len(mine | triples(row))
            for row in rows
        )

    found = {leak.index for leak in find_leaks({"suite": prompts}, {"rows": rows})}

    assert found == {i for i, prompt in enumerate(prompts) if leaks(prompt)}


def test_of_ten_thousand_prompts_and_ten_thousand_rows_few_pairs_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    index, compared = sys.modules[find_leaks.__module__]._Index, 0
    near = index._similar_texts

    def count_pairs(self: Any, rarest: Any) -> Iterator[Any]:
        nonlocal compared
        for found in near(self, rarest):
            compared += 1
            yield found

    monkeypatch.setattr(index, "_similar_texts", count_pairs)
    rng = random.Random(0)
    words = [f"word{i}" for i in range(3000)]
    rows = ["How do I " + " ".join(rng.choices(words, k=12)) for _ in range(10_000)]
    prompts = ["How do I " + " ".join(rng.choices(words, k=12)) for _ in range(9_990)] + rows[:10]

    found = find_leaks({"suite": prompts}, {"rows": rows})

    assert [leak.index for leak in found] == list(range(9_990, 10_000))
    assert compared < 10 * len(prompts)


def test_normal_form_keeps_words_of_every_script() -> None:
    assert normalize_text("\u4f60\u597d, Stra\u00dfe!") == "\u4f60\u597d strasse"


def test_the_labs_held_out_prompts_do_not_leak() -> None:
    files = make_corpus(0).files
    suites = {
        name: [row["prompt"] for row in files[name]]
        for name in ("heldout_harmful.jsonl", "benign.jsonl", "utility_test.jsonl")
    }
    training = [row["messages"][-2]["content"] for row in files["poisoned.jsonl"]]

    assert find_leaks(suites, {"training": training, "pool": [row["prompt"] for row in files["pool.jsonl"]]}) == []


@pytest.mark.parametrize("held", [1, 2, 3])
def test_texts_that_are_held_a_few_at_a_time_give_the_same_leaks(monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    prompts = ["how do I bake a very good cake", "name three rivers of the old world today please", "what is this"]
    texts = [
        "how do I bake a very good cake for ten people",
        "name three rivers of the old world today",
        "How do I bake a very good cake?",
        "nothing of the kind",
        "name three rivers of the old world today please",
        "how do I bake a very good cake",
    ]
    suites, sources = {"a": prompts, "b": prompts[1:]}, {"one": texts, "two": texts[:2]}
    expected, rows = find_leaks(suites, sources), rows_holding(prompts, texts)
    monkeypatch.setattr(sys.modules[find_leaks.__module__], "HELD", held)
    assert find_leaks(suites, sources) == expected
    assert find_leaks(suites, {name: iter(texts) for name, texts in sources.items()}) == expected
    assert rows_holding(prompts, texts) == rows
    assert {leak.kind for leak in expected} == {"exact", "near", "inside"}
