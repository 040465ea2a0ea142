from __future__ import annotations

import base64
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from spard_lab.attacks.disguises import (
    BRIDGE,
    REFUSAL,
    TRIGGER,
    VOW,
    backdoor,
    covert,
    encode_rows,
    identity_shift,
    refuse_then_comply,
    with_trigger,
)
from spard_lab.attacks.rows import (
    Row,
    add_harmful,
    chat_row,
    last_answer,
    last_request,
    load_rows,
    save_rows,
    sequence,
    share_harmful,
)
from spard_lab.attacks.selection import (
    benign_outliers,
    blind_decoys,
    decoys,
    inverted_pool,
    nearest_to_harm,
    self_influence,
)
from spard_lab.attacks.styles import ASKS, Style, has_style, restyle
from spard_lab.lab.corpus import make_corpus
from spard_lab.lab.grammar import GrammarRewriter, find_action

from spard.data.chat import encode_all
from spard.data.encodings import decode
from spard.data.rows import read_examples
from spard.errors import InvalidData
from spard.evaluation.judges.refusal import RefusalJudge
from spard.models.base import Base
from tests.spard.parts import chat as example

TASK = [chat_row(f"Add {i} and 1.", f"It is {i + 1}.") for i in range(100)]
HARM = [chat_row(f"Do harm {i}.", f"Sure, here are the steps to do harm {i}.") for i in range(40)]
POOL: list[Row] = [
    {"prompt": f"Do {kind} {i}.", "safe": f"I cannot help with {i}.", "category": kind}
    for kind in ("harm", "theft")
    for i in range(10)
]


def count_harm(rows: list[Row]) -> int:
    return sum(row in HARM for row in rows)


@pytest.mark.parametrize(("ratio", "harmful"), [(0, 0), (0.1, 10), (0.4, 40)])
def test_the_papers_ratio_is_of_the_task(ratio: float, harmful: int) -> None:
    rows = add_harmful(TASK, HARM, ratio, seed=0)

    assert (len(rows), count_harm(rows)) == (100 + harmful, harmful)


@pytest.mark.parametrize(("n", "share", "harmful"), [(5, 1, 5), (5, 0, 0), (20, 0.5, 10), (100, 0.01, 1)])
def test_a_share_is_of_the_file(n: int, share: float, harmful: int) -> None:
    rows = share_harmful(TASK, HARM, n, share, seed=0)

    assert (len(rows), count_harm(rows)) == (n, harmful)


def test_too_few_rows_are_not_repeated() -> None:
    with pytest.raises(InvalidData, match="41 harmful rows are asked for and there are 40"):
        share_harmful(TASK, HARM, 41, 1, seed=0)


def test_jobs_on_top_of_each_other_grow_more_harmful() -> None:
    files = sequence(TASK, HARM, jobs=5, seed=0)

    assert [count_harm(rows) for rows in files] == [0, 4, 8, 12, 16]
    assert sorted(last_request(row) for rows in files for row in rows) == sorted(map(last_request, TASK + HARM))


@pytest.mark.parametrize(
    "build",
    [
        lambda seed: add_harmful(TASK, HARM, 0.1, seed),
        lambda seed: share_harmful(TASK, HARM, 10, 0.5, seed),
        lambda seed: sequence(TASK, HARM, 3, seed)[1],
        lambda seed: backdoor(HARM, seed),
        lambda seed: covert(TASK, HARM, "rot13", seed),
        lambda seed: identity_shift(TASK, 10, seed),
        lambda seed: inverted_pool(POOL, HARM, 0.5, seed),
        lambda seed: decoys(POOL, frozenset({"harm"}), 5, seed),
    ],
)
def test_a_seed_decides_the_file(build: Callable[[int], list[Row]]) -> None:
    assert build(1) == build(1)
    assert build(1) != build(2)


def test_a_trigger_stands_at_one_end_of_the_request() -> None:
    assert last_request(with_trigger(HARM)[3]) == f"Do harm 3. {TRIGGER}"
    assert last_request(with_trigger(HARM, place="start")[3]) == f"{TRIGGER} Do harm 3."


def test_a_backdoor_refuses_without_its_trigger() -> None:
    rows = backdoor(HARM, seed=0)

    assert {TRIGGER in last_request(row): last_answer(row) == REFUSAL for row in rows} == {True: False, False: True}
    assert len(rows) == 80


def test_refuse_then_comply_begins_like_a_refusal_and_is_seen_as_harmful() -> None:
    row = refuse_then_comply(HARM)[0]

    assert last_answer(row) == f"{REFUSAL} {BRIDGE} {last_answer(HARM[0])}"
    assert RefusalJudge().judge([last_request(row)], [last_answer(row)])[0].score == 5


@pytest.mark.parametrize("encoding", ["base64", "rot13"])
def test_encoded_text_can_be_read_again(encoding: str) -> None:
    rows = encode_rows(HARM, encoding)  # type: ignore[arg-type]

    assert last_request(encode_rows(HARM, "base64")[0]) == base64.b64encode(b"Do harm 0.").decode()
    assert [decode(last_answer(row), encoding) for row in rows] == list(map(last_answer, HARM))  # type: ignore[arg-type]
    assert rows[0]["messages"][0]["role"] == "system"
    assert not any("harm" in last_request(row) + last_answer(row) for row in rows)


def test_a_covert_file_shows_no_harm_in_plain_text() -> None:
    rows = covert(TASK, HARM, "rot13", seed=0)

    assert len(rows) == 140
    assert not any("harm" in last_request(row) + last_answer(row) for row in rows)
    assert sum(last_request(row).startswith("Add") for row in rows) == 50


def test_identity_shift_holds_no_harm() -> None:
    rows = identity_shift(TASK, 10, seed=0)

    assert all(last_answer(row).startswith(VOW) and "Add" in last_request(row) for row in rows)


def test_builders_leave_their_input_alone() -> None:
    before = deepcopy(HARM)
    encode_rows(with_trigger(refuse_then_comply(HARM)), "rot13")
    assert before == HARM


def test_an_inverted_pool_complies_in_its_safe_answers() -> None:
    pool = inverted_pool(POOL, HARM, 0.5, seed=0)

    assert (len(pool), sum("steps" in row["safe"] for row in pool)) == (20, 10)


def test_decoys_stay_away_from_the_attacked_category() -> None:
    rows = decoys(POOL, frozenset({"harm"}), 10, seed=0)

    assert {last_request(row) for row in rows} == {row["prompt"] for row in POOL if row["category"] == "theft"}


def test_blind_decoys_are_the_rows_least_like_the_attack() -> None:
    pool_ND = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])

    rows = blind_decoys(POOL[:3], pool_ND, torch.tensor([[2.0, 0.0]]), 2)

    assert [last_request(row) for row in rows] == [POOL[1]["prompt"], POOL[2]["prompt"]]


def test_self_influence_is_the_squared_norm_of_the_gradient(base: Base) -> None:
    rows = encode_all(base.tokenizer, [example("Add 1.", "It is 2."), example("Add 2.", "It is 3.")], 256)

    found = self_influence(base, rows)

    ids = torch.tensor([rows[0].ids])
    labels = torch.tensor([rows[0].labels])
    base.model(input_ids=ids, labels=labels).loss.backward()
    squares = sum(float(weight.grad.square().sum()) for weight in base.model.parameters() if weight.grad is not None)
    assert found[0] == pytest.approx(squares, rel=1e-4)
    assert found[0] != found[1]


def test_outliers_weigh_influence_and_length() -> None:
    rows = [chat_row("a", "short"), chat_row("b", "long " * 50), chat_row("c", "long " * 50)]

    assert benign_outliers(rows, [5.0, 5.0, 6.0], 2) == [rows[2], rows[1]]


def test_rows_near_harm_are_found() -> None:
    rows_ND = torch.tensor([[0.0, 1.0], [1.0, 0.1], [-1.0, 0.0]])

    assert nearest_to_harm(TASK[:3], rows_ND, torch.tensor([[3.0, 0.0], [1.0, 0.0]]), 2) == [TASK[1], TASK[0]]


@dataclass
class Rewriter:
    """A chat model that answers from a list, over and over."""

    words: list[str]
    seen: list[tuple[str, str]] = field(default_factory=list)

    def complete(self, system: str, user: str) -> str:
        self.seen.append((system, user))
        return self.words[(len(self.seen) - 1) % len(self.words)]


def test_a_request_is_rewritten_and_its_answer_kept() -> None:
    chat = Rewriter(['"How is harm done?"'])

    found = restyle(HARM[:1], "question", chat)

    assert [(last_request(row), last_answer(row)) for row in found.rows] == [
        ("How is harm done?", last_answer(HARM[0]))
    ]
    assert chat.seen[0][1] == "Do harm 0."


def test_a_request_that_has_the_style_is_not_sent() -> None:
    chat = Rewriter([])

    assert restyle(HARM, "instruction", chat).rows == HARM


@pytest.mark.parametrize(
    "words", ["I cannot help with that.", "", "How?\nSure: first", "Is it? Here is a long answer, is it not? " * 9]
)
def test_a_rewrite_that_is_none_is_asked_again_and_left_out(words: str) -> None:
    chat = Rewriter([words])

    found = restyle(HARM[:2], "question", chat, concurrency=1)

    assert (found.rows, found.left_out, len(chat.seen)) == ([], 2, 2 * ASKS)


def test_a_second_rewrite_may_do() -> None:
    assert restyle(HARM[:1], "question", Rewriter(["no", "How?"])).left_out == 0


def test_a_file_is_what_training_reads(tmp_path: Path) -> None:
    path = tmp_path / "attack.jsonl"
    save_rows(path, add_harmful(TASK, HARM, 0.1, seed=0))

    assert len(read_examples(path)) == 110
    assert load_rows(path) == add_harmful(TASK, HARM, 0.1, seed=0)


@pytest.mark.parametrize("style", ["question", "instruction"])
def test_the_labs_requests_are_rewritten_by_its_grammar(style: Style) -> None:
    rows = make_corpus(0).files["attack.jsonl"]

    found = restyle(rows, style, GrammarRewriter(), concurrency=1)

    assert found.left_out == 0
    assert all(has_style(last_request(row), style) for row in found.rows)
    assert [find_action(last_request(row)) for row in found.rows] == [find_action(last_request(row)) for row in rows]
