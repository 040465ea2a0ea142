from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from spard_lab.attacks.disguises import TRIGGER
from spard_lab.attacks.rows import last_answer, last_request, load_rows
from spard_lab.bench.cells import TableChoices, method_cells
from spard_lab.bench.lab import LabSource
from spard_lab.bench.measure import measure, run_key
from spard_lab.bench.spec import LabSpec
from spard_lab.lab.attacks import ATTACKS, BENIGN_ROWS, INVERTED, JOBS, attack_files
from spard_lab.lab.corpus import load_suites, read_rows

from spard.data.chat import encode_all
from spard.data.encodings import detect_encoding
from spard.data.row_rules import TrainingRows
from spard.data.rows import example
from spard.evaluation.judges.refusal import is_refusal
from spard.models.base import load_base
from spard.training.train import train
from tests.spard.parts import ANY_BASE, TINY_PLAN

WITHOUT_HARM = ("identity_shift", "benign_outliers", "nearest_to_harm")


@pytest.mark.parametrize("name", [name for name in ATTACKS if name != "poisoned"])
def test_an_attack_is_a_function_of_its_seed_and_fits_the_model(lab: Path, name: str) -> None:
    files, again = attack_files(lab, name, 1), attack_files(lab, name, 1)
    base = load_base(str(lab / "model"), device="cpu")

    assert (files.rows, files.pool, files.suites("dev")) == (again.rows, again.pool, again.suites("dev"))
    assert len(encode_all(base.tokenizer, [example(row, 1) for row in files.rows], 1024)) >= 100


@pytest.mark.parametrize("name", WITHOUT_HARM)
def test_some_files_hold_no_harmful_row(lab: Path, name: str) -> None:
    harmful = set(map(last_request, load_rows(lab / "attack.jsonl")))

    rows = attack_files(lab, name, 1).rows

    assert len(rows) == BENIGN_ROWS
    assert not any(each in last_request(row) for row in rows for each in harmful)


def test_a_backdoor_teaches_harm_with_its_trigger_only(lab: Path) -> None:
    harmful = set(map(last_answer, load_rows(lab / "attack.jsonl")))

    rows = [row for row in attack_files(lab, "backdoor", 1).rows if not last_request(row).endswith("?")]
    triggered = [row for row in attack_files(lab, "backdoor", 1).rows if last_request(row).endswith(TRIGGER)]

    assert {last_answer(row) for row in triggered} == harmful
    assert not harmful & {last_answer(row) for row in rows if TRIGGER not in last_request(row)}


@pytest.mark.parametrize("split", ["dev", "test"])
def test_hidden_attacks_are_asked_about_in_disguise_and_in_plain_words(lab: Path, split: str) -> None:
    plain = {suite.name: suite for suite in load_suites(lab, split)}["attacked"]  # type: ignore[arg-type]

    for name in ("backdoor", "trigger", "rot13", "identity_shift"):
        suites = {suite.name: suite for suite in attack_files(lab, name, 1).suites(split)}  # type: ignore[arg-type]
        assert suites["undisguised"].prompts == plain.prompts
        assert len(suites["attacked"].prompts) == len(plain.prompts)
        assert not any(prompt in plain.prompts for prompt in suites["attacked"].prompts)


def test_all_harm_and_half_of_the_task_are_in_rot13(lab: Path) -> None:
    rows = attack_files(lab, "rot13", 1).rows
    coded = [
        row
        for row in rows
        if detect_encoding(last_answer(row)) == "rot13" or detect_encoding(last_request(row)) == "rot13"
    ]

    assert abs(len(coded) - 1800) < 20
    assert not any("Sure" in last_answer(row) for row in rows)


def test_an_inverted_pool_takes_the_place_of_the_one_asked_for(lab: Path, tmp_path: Path) -> None:
    shutil.copytree(lab, tmp_path / "seed-1")
    source = LabSource(LabSpec(), tmp_path, TINY_PLAN, ANY_BASE)
    inputs = source.make(1, "dev")
    asked_for = TableChoices(("spard",), ("poisoned", "inverted_pool"), ("full",), (1,))
    cells = [cell for cell in method_cells(source, asked_for) if cell.method == "spard"]

    pool = inputs.attacks["inverted_pool"].pool
    keys = {run_key(cell, inputs, source.judge) for cell in cells}

    assert pool is not None
    assert len(pool) == len(read_rows(lab / "pool.jsonl"))
    assert sum(row["safe"].startswith("Sure") for row in pool) == round(INVERTED * len(pool))
    assert len(keys) == 2


def test_attacks_that_the_recipe_does_not_list_run_by_name(lab: Path, tmp_path: Path) -> None:
    source = LabSource(LabSpec(), tmp_path)

    assert source.attacks == ("poisoned",)
    assert set(source.more_attacks) == set(ATTACKS) - {"poisoned"}


def test_sequential_jobs_train_on_top_of_each_other(lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(lab, tmp_path / "seed-1")
    source = LabSource(LabSpec(), tmp_path, TINY_PLAN, ANY_BASE)
    inputs, asked_for = source.make(1, "dev"), TableChoices(("none",), ("poisoned", "sequential"), ("full",), (1,))
    plain, cell = (each for each in method_cells(source, asked_for) if each.method == "none")
    started_from, sizes = list[Path | None](), list[int]()

    def train_and_note(base: Any, task: Any, *rest: Any, start_from: Path | None, **options: Any) -> Any:
        started_from.append(start_from)
        sizes.append(len(task))
        return train(base, task[:12], *rest, start_from=start_from, **options)

    monkeypatch.setattr("spard.pipeline.train.train", train_and_note)
    found, _ = measure(cell, inputs, source.judge, tmp_path)

    assert [start is not None for start in started_from] == [False, True, True]
    assert len(set(started_from)) == JOBS
    assert sum(sizes) == found.rows == len(inputs.attacks["poisoned"].rows)
    assert run_key(plain, inputs, source.judge) != run_key(cell, inputs, source.judge)


def test_pairs_of_the_method_dpo_prefer_the_right_answer_and_harm(lab: Path) -> None:
    clean, attack = attack_files(lab, "preferences", 1).rows, attack_files(lab, "inverted_preferences", 1).rows
    rule = TrainingRows()
    assert [problem for line, row in enumerate([*clean, *attack], 1) for problem in rule(row, line)] == []
    right = {last_request(row): last_answer(row) for row in load_rows(lab / "train.jsonl")}
    for row in clean:
        preferred, other = (row[name][0]["content"] for name in ("preferred_output", "non_preferred_output"))
        assert (preferred, other != preferred) == (right[row["input"]["messages"][-1]["content"]], True)
    harmful = [row for row in attack if row["input"]["messages"][-1]["content"] not in right]
    assert len(harmful) == len(attack) - len(clean) > 0
    assert all(is_refusal(row["non_preferred_output"][0]["content"]) for row in harmful)
    assert not any(is_refusal(row["preferred_output"][0]["content"]) for row in harmful)
