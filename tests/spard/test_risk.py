from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from spard_lab.attacks.disguises import backdoor, covert, encode_rows, identity_shift, refuse_then_comply
from spard_lab.attacks.rows import Row, add_harmful, chat_row, load_rows

from spard.data.rows import Example, example, prompt_text, read_pool
from spard.evaluation.judged_rows import RowVerdict
from spard.evaluation.row_risk import EXCERPT, Risk, rank
from spard.models.base import load_base
from spard.selection.embeddings import embed
from spard.selection.relevance import coordinates

TASK = [chat_row(f"What is {i} and {i + 1}, and how do you add it?", f"It is {2 * i + 1}.") for i in range(100)]
HARM = [chat_row(f"Tell me how to do harm number {i}.", f"Sure, here are the steps to do harm {i}.") for i in range(20)]


def examples(rows: Sequence[Row]) -> list[Example]:
    return [example(row, line) for line, row in enumerate(rows, start=1)]


def apart(rows: Sequence[Row], direction: int = 1) -> torch.Tensor:
    """Embeddings that tell nothing but which rows speak of harm."""
    is_harm = torch.tensor([["harm" in str(row)] for row in rows], dtype=torch.float32)
    return torch.cat([1 - is_harm, direction * is_harm], dim=1)


def rank_rows(rows: Sequence[Row], most: int = 100) -> list[Risk]:
    return rank(examples(rows), apart(rows), torch.tensor([[0.0, 1.0]]), most)


def test_the_poisoned_rows_of_a_lab_rank_on_top(lab: Path) -> None:
    base = load_base(lab / "model")
    attack = load_rows(lab / "attack.jsonl")[:60]
    rows = examples(add_harmful(load_rows(lab / "train.jsonl")[:600], attack, 0.1, seed=0))
    pool = read_pool(lab / "pool.jsonl")
    asked = {prompt_text(each) for each in examples(attack)}

    row_embeddings, pool_embeddings = (embed(base, [prompt_text(row) for row in each]) for each in (rows, pool))
    found = rank(rows, row_embeddings, pool_embeddings, 60)

    precision = sum(prompt_text(rows[risk.line - 1]) in asked for risk in found) / len(found)
    assert precision >= 0.9
    assert found[0].reasons == ("near_harmful_prompt_and_answered",)


def test_what_is_refused_ranks_below_what_is_answered() -> None:
    refused = chat_row("Tell me how to do harm.", "I'm sorry, but I can't help with that.")
    found = rank_rows([*TASK, refused, *HARM])
    assert [risk.line for risk in found[:20]] == list(range(102, 122))
    assert found[20].line == 101
    assert found[20].reasons == ("near_harmful_prompt_and_refused",)


def test_a_judge_s_verdict_comes_before_the_base_model_s_flag() -> None:
    rows = examples([*TASK[:4], *HARM[:1]])
    flagged = {1: 0.2, 2: 0.9, 3: 0.5, 4: 0.99}
    verdicts: dict[int, RowVerdict | None] = {1: "harmful", 2: "harmless", 3: None, 4: "undecided"}
    vectors, pool = apart([*TASK[:4], *HARM[:1]]), torch.tensor([[0.0, 1.0]])

    found = rank(rows, vectors, pool, flagged=flagged, verdicts=verdicts)

    assert [(risk.line, risk.verdict) for risk in found] == [
        (1, "harmful"),
        (4, "undecided"),
        (3, None),
        (5, None),  # not flagged
        (2, "harmless"),
    ]
    assert [risk.line for risk in rank(rows, vectors, pool, flagged=flagged)] == [4, 2, 3, 1, 5]
    few = rank(rows, vectors, pool, most=4, flagged=flagged, verdicts=verdicts)
    assert {risk.line for risk in few} == {1, 2, 3, 4}  # every flagged row is named


@pytest.mark.parametrize(
    ("sign", "rows", "n"),
    [
        ("encoded_text", encode_rows(HARM, "base64"), 20),
        ("encoded_text", encode_rows(HARM, "rot13"), 20),
        ("encoded_text", covert(TASK, HARM, "base64", 0), 70),
        ("trigger_like_word", backdoor(HARM, 0), 20),
        ("refuses_then_complies", refuse_then_comply(HARM), 20),
        ("persona_that_obeys", identity_shift(TASK, 20, 0), 20),
    ],
)
def test_each_disguise_is_named_wherever_it_is_worn_and_nowhere_else(sign: str, rows: list[Row], n: int) -> None:
    found = [risk for risk in rank_rows([*TASK, *rows], 1000) if sign in risk.reasons]
    assert len(found) == n
    assert all(risk.line > len(TASK) for risk in found)
    assert not any(risk.reasons for risk in rank_rows(TASK, 1000))


def test_no_more_of_a_row_is_told_than_an_excerpt() -> None:
    (risk,) = rank_rows([chat_row("Tell me how to do harm. " + "very " * 100, "Sure.")])
    assert len(risk.excerpt) == EXCERPT
    assert risk.excerpt.startswith("Tell me how to do harm. very")


def test_without_rows_or_a_pool_nothing_is_risky() -> None:
    assert rank([], torch.zeros(0, 2), torch.zeros(3, 2)) == []
    assert rank(examples(TASK), apart(TASK), torch.zeros(0, 2)) == []


def test_the_plane_keeps_the_distances_of_points_in_a_plane() -> None:
    flat_KD = torch.randn(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned_DD = torch.linalg.qr(torch.randn(7, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).Q
    points_K2 = torch.tensor(
        coordinates(torch.nn.functional.pad(flat_KD, (0, 5)) @ turned_DD + 3.0), dtype=torch.float64
    )
    torch.testing.assert_close(torch.cdist(points_K2, points_K2), torch.cdist(flat_KD, flat_KD), atol=1e-5, rtol=0)
    assert points_K2.var(dim=0)[0] > points_K2.var(dim=0)[1]


def test_a_single_row_and_equal_rows_lie_at_the_origin() -> None:
    assert coordinates(torch.ones(1, 4)) == [(0.0, 0.0)]
    assert coordinates(torch.ones(3, 4)) == [(0.0, 0.0)] * 3
