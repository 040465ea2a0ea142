"""What is held out of a pool passes the gate's own leak check, whatever near duplicates the pool is full of."""

from __future__ import annotations

import json
import os
import random
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spard_lab.lab.corpus import make_corpus

from app.catalog.imports import attack_rows, held_out_digests, keep_selectable
from spard.config import GateThresholds
from spard.data.overlap import TEMPLATE, clusters, find_leaks, rows_holding
from spard.data.rows import Prompt
from spard.evaluation.audit import Suite
from spard.evaluation.gate import gate
from spard.evaluation.results import SuiteResult
from spard.evaluation.suites import leak_reasons
from tests.spard.parts import chat

WORDS = [f"word{i}" for i in range(400)]


def pool(seed: int) -> list[dict[str, Any]]:
    """Several hundred rows: repeats, one word changed, words around a prompt, other case and punctuation."""
    rng = random.Random(seed)
    prompts: list[str] = []
    while len(prompts) < 300:
        words = rng.choices(WORDS, k=rng.randrange(1, 24))
        for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
            other = list(words)
            if rng.random() < 0.5:
                other[rng.randrange(len(other))] = rng.choice(WORDS)
            if rng.random() < 0.3:
                other = [*rng.choices(WORDS, k=rng.randrange(4)), *other, *rng.choices(WORDS, k=rng.randrange(4))]
            text = " ".join(other)
            prompts.append(rng.choice([text, text.upper(), f"{text}?!", text.replace(" ", ", ")]))
    rng.shuffle(prompts)
    return [{"prompt": prompt, "safe": "No.", "category": "c"} for prompt in prompts]


def split(rows: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """The prompts that attack, and those that can be trained on."""
    held = held_out_digests(rows)
    return [str(row["prompt"]) for row in attack_rows(rows, held)], [
        str(row["prompt"]) for row in keep_selectable(rows, held)
    ]


def decision(attacking: list[str], trained: list[str]) -> str:
    """What the gate makes of an adapter that answers every attack as its base model does."""
    suites = [Suite("pool-heldout", "harmful", tuple(Prompt(text) for text in attacking))]
    leaks = leak_reasons(suites, {"safety pool": [chat(text, "No.") for text in trained]})
    n = len(attacking)
    result = SuiteResult("pool-heldout", "harmful", "rules", n, 0, 0, 0, 0.0, 0.0, 0.1)
    return gate([result], [result], GateThresholds(), leaks).decision


@pytest.mark.parametrize("seed", range(50 if os.environ.get("SPARD_SOAK") == "1" else 5))
def test_what_is_held_out_passes_the_gate(seed: int) -> None:
    rows = pool(seed)
    attacking, trained = split(rows)
    assert decision(attacking, trained) == "pass"
    assert 0.15 * len({*attacking, *trained}) <= len(set(attacking)) <= 0.2 * len({*attacking, *trained}) + 1


def test_the_lab_s_pool_passes_the_gate() -> None:
    attacking, trained = split(make_corpus(0).files["pool.jsonl"])
    assert len(attacking) >= 100
    assert decision(attacking, trained) == "pass"


def test_the_split_does_not_depend_on_the_order_of_rows() -> None:
    rows = pool(0)
    assert held_out_digests(rows) == held_out_digests(rows[::-1])


def test_prompts_without_near_duplicates_are_split_as_ever() -> None:
    """Every fifth digest is held out, as in earlier versions: importing such a pool again changes nothing."""
    rows: list[dict[str, object]] = [{"prompt": f"request {i}", "safe": "No."} for i in range(103)]
    assert held_out_digests(rows) == set(sorted(sha256(str(row["prompt"]).encode()).digest() for row in rows)[4::5])


def test_a_pool_of_two_large_clusters_still_attacks() -> None:
    rows = [
        {"prompt": f"Please tell me at some length about {topic} and all that one has to know of it {i}", "safe": "No."}
        for topic, n in (("the making of fire", 30), ("the picking of old locks", 20))
        for i in range(n)
    ]
    attacking, trained = split(rows)
    assert (len(attacking), len(trained)) == (20, 30)
    assert find_leaks({"attacks": attacking}, {"pool": trained}) == []


def test_no_benign_prompt_attacks_nor_a_prompt_that_is_nearly_one() -> None:
    asked = [f"{what} number {i} of this very long list" for i in range(40) for what in ("Do harm", "Bake cake")]
    rows: list[dict[str, Any]] = [
        {"prompt": text, "benign": True} if text.startswith("Bake") else {"prompt": text, "safe": "No."}
        for text in asked
    ]
    rows += [{"prompt": f"{text}!", "safe": "No."} for text in asked if text.startswith("Bake")]
    attacking, trained = split(rows)
    assert len(attacking) == 8
    assert all(text.startswith("Do harm") for text in attacking)
    assert len(attacking) + len(trained) == len(rows)
    without = [row for row in rows if row["prompt"].startswith("Do harm")]
    assert held_out_digests(rows) == held_out_digests(without)


def test_a_pool_of_one_cluster_is_whole() -> None:
    prompts = [f"Please tell me at some length about the making of fire and smoke {i}" for i in range(30)]
    assert held_out_digests({"prompt": prompt} for prompt in prompts) == set()


texts = st.lists(st.lists(st.sampled_from("abcde"), min_size=0, max_size=14).map(" ".join), min_size=1, max_size=10)


@settings(max_examples=300, deadline=None)
@given(texts)
def test_clusters_are_the_connected_components_of_leaks(found: list[str]) -> None:
    labels = clusters(found)
    edges = [(i, j) for i, text in enumerate(found) for j in rows_holding([text], found)]
    reached = list(range(len(found)))
    for _ in found:
        for i, j in edges:
            reached[i] = reached[j] = min(reached[i], reached[j])
    for i, text in enumerate(found):
        for j, other in enumerate(found):
            is_joined = reached[i] == reached[j] or text.split() == other.split()
            assert (labels[i] == labels[j]) == is_joined


def test_texts_that_share_rare_triples_with_very_many_are_one_cluster() -> None:
    """They are joined without being compared: two filled-in words of 42 leave them less alike than near duplicates."""
    start, middle, end = (" ".join(WORDS[i : i + n]) for i, n in ((0, 20), (20, 10), (30, 10)))
    few, many = ([f"{start} a{i} {middle} b{i} {end}" for i in range(n)] for n in (TEMPLATE // 2, 2 * TEMPLATE))
    assert len(set(clusters(few))) == len(few)
    assert len(set(clusters([*many, "Something else."]))) == 2


@settings(max_examples=200, deadline=None)
@given(texts, texts)
def test_every_row_that_holds_a_prompt_is_found(prompts: list[str], rows: list[str]) -> None:
    expected = {i for i, row in enumerate(rows) if find_leaks({"suite": prompts}, {"row": [row]})}
    assert rows_holding(prompts, rows) == expected


def test_attacks_have_no_answers() -> None:
    rows = pool(1)
    assert all(row.keys() <= {"prompt", "category"} for row in attack_rows(rows, held_out_digests(rows)))
    assert json.dumps(list(attack_rows(rows, held_out_digests(rows))))
