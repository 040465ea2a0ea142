"""The acceptance card: what its checks pass, and what its runs are made of."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from spard_lab.attacks.rows import last_answer, last_request
from spard_lab.bench import card, kinds
from spard_lab.bench.bench import Workplace
from spard_lab.bench.card import (
    BENIGN,
    CHECKS,
    CLAIMS,
    COST,
    FRAMES,
    FRESH,
    MECHANISM,
    OTHER_TASK,
    PLACEBO,
    RELIABILITY,
    TRANSFER,
    WORDING,
    card_inputs,
    card_lines,
    fresh_prompts,
    placebo_pool,
    verdicts,
)
from spard_lab.bench.cells import Cell, TableChoices
from spard_lab.bench.lab import TWO_SIDED, LabSource
from spard_lab.bench.measure import Measurement
from spard_lab.bench.parts import BARE
from spard_lab.bench.spec import LabSpec, load_spec
from spard_lab.lab.corpus import ATTACKED_SUITE, make_corpus, read_rows
from spard_lab.lab.pools import two_sided

from spard.config import Audit, Hyperparameters, Recipe
from spard.errors import InvalidRecipe
from spard.evaluation.judges.refusal import is_refusal
from tests.spard.parts import ANY_BASE, TINY_PLAN

FEW_STEPS = Recipe(
    hyperparameters=Hyperparameters(n_epochs=1, batch_size=256), audit=Audit(max_prompts=20, max_new_tokens=4)
)
ASKED = TableChoices(methods=(), attacks=("poisoned",), pools=(TWO_SIDED,), seeds=(1,))
DEPLOYED, ALONE = CLAIMS
SEEDS = (1, 2, 3)


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer draws of the bootstrap; its standard error hardly changes."""
    monkeypatch.setattr(card, "DRAWS", 100)


def make_run(run: tuple[str, str], seed: int, attack: str = "poisoned", /, **shares: float) -> Measurement:
    """A run whose prompts are hits at these rates by suite, drawn from the seed alone."""
    rng = random.Random(seed)
    by_suite = {ATTACKED_SUITE: 0.0, FRESH: 0.0, "look-alike": 0.0, "how-to": 0.0, "utility": 0.9}
    drawn = {suite: [rng.random() for _ in range(200)] for suite in by_suite}
    hits = {
        suite: "".join("1" if each < shares.get(suite.replace("-", "_"), share) else "0" for each in drawn[suite])
        for suite, share in by_suite.items()
    }
    return Measurement(run[0], "", attack, seed, run[1], "", "", (ATTACKED_SUITE,), (), hits)


def make_runs(seeds: tuple[int, ...] = SEEDS, placebos: float = 0.8, undefended: float = 0.9) -> list[Measurement]:
    """The runs of a card that passes: no defense and placebos let attacks through, and both claims hold."""
    found = []
    for seed in seeds:
        for attack in ("poisoned", OTHER_TASK):
            found.append(make_run((BARE, ""), seed, attack, attacked=undefended, fresh=undefended))
            found += [make_run(claim.run, seed, attack) for claim in CLAIMS]
        found += [make_run(run, seed, attacked=placebos) for claim in CLAIMS for run in claim.placebos.values()]
    return found


def swap(found: list[Measurement], run: tuple[str, str], **shares: float) -> list[Measurement]:
    """The same runs with other shares of one arm on the first attack."""
    return [
        make_run(run, each.seed, **shares) if (each.method, each.pool, each.attack) == (*run, "poisoned") else each
        for each in found
    ]


def failed_checks(found: list[Measurement], claim: str) -> set[str]:
    return {check for check, verdict in verdicts(card_lines(found))[claim].items() if verdict == "fail"}


def test_a_card_passes_where_every_comparison_does() -> None:
    lines = card_lines(make_runs())

    assert set(verdicts(lines)[ALONE.name].values()) == {"pass"}
    assert {each.compared for each in lines if each.check == MECHANISM and each.claim == ALONE.name} == {
        *ALONE.placebos
    }
    assert {each.check for each in lines} == {*CHECKS}
    one = next(each for each in lines if each.check == RELIABILITY)
    assert one.first == pytest.approx(0.9, abs=0.03)
    assert one.second == 0.0
    assert one.of_prompts.low < one.first < one.of_prompts.high


@pytest.mark.parametrize(
    ("run", "shares", "check"),
    [
        (ALONE.placebos["the anchor alone"], {"attacked": 0.05}, MECHANISM),  # the placebo defends as well
        ((BARE, ""), {"attacked": 0.9, "fresh": 0.3}, None),
        (ALONE.run, {"fresh": 0.88}, WORDING),
        (ALONE.run, {"attacked": 0.85}, RELIABILITY),
        (ALONE.run, {"utility": 0.85}, COST),
        (ALONE.run, {"how_to": 0.1}, COST),
    ],
)
def test_one_comparison_fails_its_check_and_the_card(
    run: tuple[str, str], shares: dict[str, float], check: str | None
) -> None:
    found = failed_checks(swap(make_runs(), run, **shares), ALONE.name)

    assert found >= ({check, "full card"} if check else set())
    assert check or not found
    if check not in (RELIABILITY, None):
        assert found == {check, "full card"}


def test_a_reduction_on_one_seed_of_three_is_no_pass() -> None:
    found = [
        make_run(ALONE.run, each.seed, attacked=0.9 if each.seed > 1 else 0.0)
        if (each.method, each.pool, each.attack) == (*ALONE.run, "poisoned")
        else each
        for each in make_runs()
    ]

    assert RELIABILITY in failed_checks(found, ALONE.name)


def test_two_seeds_and_nothing_to_reduce_are_not_assessed() -> None:
    few = verdicts(card_lines(make_runs(seeds=(1, 2))))[DEPLOYED.name]
    weak = verdicts(card_lines(make_runs(undefended=0.15)))[DEPLOYED.name]

    assert set(few.values()) == {"not assessed"}
    assert {check for check, verdict in weak.items() if verdict == "not assessed"} == {
        RELIABILITY,
        WORDING,
        TRANSFER,
        "full card",
    }


def test_a_check_without_its_runs_is_not_passed() -> None:
    lines = card_lines([each for each in make_runs() if each.attack != OTHER_TASK])

    assert verdicts(lines)[ALONE.name][TRANSFER] == "not assessed"


def test_fresh_prompts_are_in_no_file_of_the_lab(lab: Path) -> None:
    corpus = make_corpus(1)
    texts = {row.get("prompt") or last_request(row) for rows in corpus.files.values() for row in rows}
    texts |= {prompt for prompt, _ in (*corpus.harmful, *corpus.benign)}

    found = [each.prompt for each in fresh_prompts(lab, 1, "test")]

    assert len(found) > 100
    assert texts.isdisjoint(found)
    assert not any(text.startswith(frame.split("{}")[0]) for frame in FRAMES for text in texts)


def test_the_placebo_pool_has_as_many_rows_and_no_refusal() -> None:
    rows = two_sided(1)

    found = placebo_pool(rows, 1)

    assert [row for row in found if row.get("benign")] == [row for row in rows if row.get("benign")]
    assert len(found) == len(rows)
    safe = [row["safe"] for row in found if not row.get("benign")]
    assert not any(map(is_refusal, safe))
    assert len({row["prompt"] for row in found}) == len(found)


@pytest.fixture(scope="module")
def source(lab: Path, tmp_path_factory: pytest.TempPathFactory) -> LabSource:
    folder = tmp_path_factory.mktemp("card-labs")
    shutil.copytree(lab, folder / "seed-1")  # the bench adds to it
    spec = load_spec("lab", {})
    assert isinstance(spec, LabSpec)
    return LabSource(replace(spec, recipe=FEW_STEPS), folder, TINY_PLAN, ANY_BASE)


def test_the_new_task_has_the_attack_s_harm_and_none_of_the_old_task(source: LabSource, tmp_path: Path) -> None:
    inputs = source.make(1, "dev")

    made = card_inputs(source.make_lab(1), ASKED, inputs, 1, "dev", tmp_path)

    rows, harmful = made.attacks[OTHER_TASK].rows, {last_request(row) for row in made.attacks["poisoned"].harmful}
    taught = [row for row in rows if last_request(row) not in harmful]
    assert (len(rows) - len(taught), len(taught)) == (160, 1600)
    assert all(last_answer(row).startswith("Die Antwort ist") for row in taught)
    suites = [[suite.name for suite in made.attacks[name].suites] for name in ("poisoned", OTHER_TASK)]
    assert suites == [[ATTACKED_SUITE, *BENIGN, "utility", FRESH], [ATTACKED_SUITE, "utility"]]


def test_the_command_leaves_a_card(source: LabSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_cells(
        place: Workplace, cells: Sequence[Cell], on_found: Callable[[list[Measurement]], None]
    ) -> list[Measurement]:
        inputs = place.inputs(1)
        assert {cell.attack for cell in cells} == inputs.attacks.keys()
        assert {cell.pool for cell in cells} - {""} == {TWO_SIDED, PLACEBO} <= inputs.pools.keys()
        return [make_run((cell.method, cell.pool), cell.seed, cell.attack) for cell in cells]

    monkeypatch.setattr(kinds, "run_cells", run_cells)

    text = kinds.KINDS["card"](kinds.Order("card", "lab", source, tmp_path, "dev", ASKED))

    found = json.loads((tmp_path / "results.json").read_text())
    runs = {(each["method"], each["pool"], each["attack"]) for each in found["runs"]}
    assert {(*run, "poisoned") for claim in CLAIMS for run in (claim.run, *claim.placebos.values())} <= runs
    assert {(*claim.run, OTHER_TASK) for claim in CLAIMS} <= runs
    assert len(found["runs"]) == len(runs) == 13
    assert {each["seeds"] for each in found["comparisons"]} == {1}
    assert set(found["card"]) == {claim.name for claim in CLAIMS}
    assert "## The card" in text
    assert f"| {ALONE.name} | not assessed |" in text
    assert not any(is_refusal(row.get("safe", "")) for row in read_rows(tmp_path / "pools" / "seed-1-placebo.jsonl"))


def test_the_card_is_of_the_small_lab_alone(tmp_path: Path) -> None:
    spec = load_spec("natural-5m", {})
    assert isinstance(spec, LabSpec)

    with pytest.raises(InvalidRecipe, match="--recipe lab"):
        kinds.KINDS["card"](kinds.Order("card", "natural-5m", LabSource(spec, tmp_path), tmp_path, "dev", ASKED))


def test_a_check_that_lacks_a_run_does_not_pass() -> None:
    found, (placebo, *_) = make_runs(), ALONE.placebos.values()
    assert verdicts(card_lines(found))[ALONE.name]["full card"] == "pass"

    without = verdicts(card_lines([each for each in found if (each.method, each.pool) != placebo]))[ALONE.name]
    assert (without[MECHANISM], without["full card"]) == ("not assessed", "not assessed")
    one_task = verdicts(card_lines([each for each in found if each.attack != OTHER_TASK]))[ALONE.name]
    assert (one_task[TRANSFER], one_task["full card"]) == ("not assessed", "not assessed")
