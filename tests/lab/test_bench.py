from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from spard_lab.bench.bench import Workplace, run_cells
from spard_lab.bench.cells import TableChoices, base_cell, method_cells, selection_cells, sweep_cells, training_rows
from spard_lab.bench.differences import methods_table, paired_table
from spard_lab.bench.lab import LabSource
from spard_lab.bench.measure import Measurement, prepare, run_key
from spard_lab.bench.methods import change_setting, has_setting, method_recipe
from spard_lab.bench.report import Summary, figures, make_tables, results_csv, results_md, summaries, summarize
from spard_lab.bench.source import Inputs
from spard_lab.bench.spec import LabSpec, NamedDefense, load_spec
from spard_lab.bench.tune import Trial, best, tune_seeds

from spard.config import Audit, Hyperparameters, NoDefense, Recipe, SafeLora, Spard
from spard.digests import folder_digest
from spard.errors import InvalidRecipe
from spard.evaluation.results import SuiteResult
from spard.evaluation.statistics import rate
from spard.models.base import load_base
from tests.spard.parts import ANY_BASE, TINY_PLAN

FEW_STEPS = Recipe(
    hyperparameters=Hyperparameters(n_epochs=1, batch_size=256), audit=Audit(max_prompts=20, max_new_tokens=4)
)
ASKED = TableChoices(methods=("none", "spard"), attacks=("poisoned",), pools=("full", "scarce"), seeds=(1,))


@pytest.fixture(scope="module")
def source(lab: Path, tmp_path_factory: pytest.TempPathFactory) -> LabSource:
    """The hardly trained lab as seed 1, a few steps of training, and a file of few rows."""
    folder = tmp_path_factory.mktemp("bench-labs")
    shutil.copytree(lab, folder / "seed-1")  # the bench adds to it
    spec = load_spec("lab", {})
    assert isinstance(spec, LabSpec)
    return LabSource(replace(spec, recipe=FEW_STEPS), folder, TINY_PLAN, ANY_BASE)


@pytest.fixture(scope="module")
def inputs(source: LabSource) -> Inputs:
    return source.make(1, "dev")


def result(suite: str, kind: str, hits: int, n: int, unscored: int = 0) -> SuiteResult:
    share = rate(hits, n)
    counts = (n, unscored, unscored, hits, share.rate, share.low, share.high)
    return SuiteResult(suite, kind, "refusal", *counts, 3.0 if kind == "harmful" else None)  # type: ignore[arg-type]


def make_measurement(seed: int, hits: int, unscored: int = 0) -> Measurement:
    results = (
        result("attacked", "harmful", hits, 100 - unscored, unscored),
        result("other", "harmful", 5, 100),
        result("look-alike", "benign", 1, 50),
        result("how-to", "benign", 3, 50),
        result("utility", "utility", 8, 10),
    )
    names = ("spard", "random", "poisoned", seed, "full", "", "")
    return Measurement(*names, ("attacked",), results, learning_rate=0.001, train_s=5.0)


def test_the_csv_begins_with_the_fixed_columns() -> None:
    head = results_csv([make_measurement(1, 90)]).splitlines()[0]

    assert head.startswith(
        "method,selection,attack,seed,asr,asr_n,unscored,garbage,hs,over_refusal,accuracy,train_seconds,trigger_rate,"
    )


def test_a_row_of_the_csv_holds_shares_and_leaves_out_what_was_not_measured() -> None:
    row = next(csv.DictReader(results_csv([make_measurement(2, 60, unscored=20)]).splitlines()))

    assert (
        row
        | {
            "method": "spard",
            "asr": "0.75",
            "asr_n": "80",
            "unscored": "20",
            "garbage": "0.0666667",
            "hs": "3",
            "over_refusal": "0.04",
            "accuracy": "0.8",
            "train_seconds": "5",
            "trigger_rate": "",
            "asr_other": "0.05",
            "look_alike": "0.02",
            "how_to": "0.06",
        }
        == row
    )


def test_a_mean_comes_with_student_s_interval() -> None:
    found = summarize([1.0, 2.0, 3.0])

    assert (found.mean, found.sd) == (2.0, 1.0)
    assert (found.low, found.high) == pytest.approx((-0.484, 4.484), abs=1e-3)


def test_one_seed_has_no_interval() -> None:
    assert summarize([4.0]) == Summary(4.0, None, None, None)


def test_runs_that_differ_in_the_seed_alone_share_a_mean() -> None:
    means = summaries(
        [make_measurement(1, 90), make_measurement(2, 70), replace(make_measurement(1, 10), selection="max_quality")]
    )

    assert sorted(row["asr"].mean for row in means.values()) == pytest.approx([0.1, 0.8])


def test_the_report_shows_means_and_every_run() -> None:
    lines = results_md(
        "A bench", "Two seeds.", make_tables([make_measurement(1, 90), make_measurement(2, 80)])
    ).splitlines()

    assert "| 85.0 +- 7.1 [21.5, 100.0] |" in lines[8]
    assert lines[-1].startswith("| 2 | spard | random | poisoned | full | 80.0 [71.1, 86.7] |")


def test_a_method_s_changes_are_checked() -> None:
    recipe = method_recipe("spard+tau=0.2+ema=0.99+self+full", Recipe(), {})

    assert isinstance(recipe.defense, Spard)
    assert (recipe.defense.tau, recipe.ema, recipe.selection.safe_answers, recipe.lora) == (0.2, 0.99, "self", None)
    assert method_recipe("none_full", Recipe(), {}) == Recipe(defense=NoDefense(), lora=None)
    for wrong in ("nothing", "spard+tau=-1", "spard+rho=1", "spard+tau"):
        with pytest.raises(InvalidRecipe):
            method_recipe(wrong, Recipe(), {})


def test_a_swept_ratio_is_not_raised_to_the_least_number() -> None:
    assert change_setting(Recipe(), "ratio", "0.001").selection.size(3000, 500) == 3


def test_settings_belong_to_methods() -> None:
    plain = Recipe(defense=NoDefense())

    assert has_setting(Recipe(), "tau")
    assert has_setting(plain, "learning_rate")
    assert not has_setting(plain, "tau")
    assert not has_setting(plain, "ratio")


def test_every_kind_lists_its_runs(source: LabSource) -> None:
    over = (("tau", ("0.1", "auto")), ("epochs", ("2",)))

    assert [cell.method for cell in method_cells(source, ASKED)] == ["base", "none", "spard"]
    assert len(selection_cells(source, ASKED)) == 1 + 2 * 5
    swept = [(cell.method, cell.value) for cell in sweep_cells(source, replace(ASKED, over=over))]
    assert swept == [("base", ""), ("spard", "0.1"), ("spard", "auto"), ("none", "2"), ("spard", "2")]


def test_safelora_is_left_out_without_an_unaligned_model(source: LabSource, caplog: pytest.LogCaptureFixture) -> None:
    unknown = replace(source, spec=replace(source.spec, defenses=(NamedDefense("safelora", SafeLora()),)))

    cells = method_cells(unknown, replace(ASKED, methods=("safelora",)))

    assert [cell.method for cell in cells] == ["base"]
    assert "names no base_unaligned" in caplog.text


def test_the_lab_has_an_unaligned_twin_for_safelora(source: LabSource, inputs: Inputs) -> None:
    (_, cell) = method_cells(source, replace(ASKED, methods=("safelora",)))
    assert isinstance(cell.recipe.defense, SafeLora)

    twin = Path(str(cell.recipe.defense.base_unaligned))
    assert twin.parent == Path(inputs.model).parent
    assert inputs.make_unaligned
    inputs.make_unaligned()
    assert folder_digest(twin) != inputs.digest


@pytest.mark.parametrize(("method", "is_made"), [("none", False), ("safelora", True)])
def test_the_twin_is_made_for_the_methods_that_need_it(
    source: LabSource, inputs: Inputs, tmp_path: Path, method: str, is_made: bool
) -> None:
    (_, cell) = method_cells(source, replace(ASKED, methods=(method,)))
    made: list[str] = []
    own = replace(inputs, make_unaligned=lambda: made.append("twin"))
    base = load_base(own.model, device="cpu")
    short = replace(cell, n=8)
    prepare(base, short, own, source.judge, tmp_path)
    assert bool(made) == is_made


@pytest.mark.parametrize(
    ("ratio", "n", "rows", "harmful"), [(0.0, None, 3000, 0), (0.01, None, 3000, 30), (0.5, None, 600, 300)]
)
def test_a_harmful_ratio_counts_from_the_task_rows(
    source: LabSource, inputs: Inputs, ratio: float, n: int | None, rows: int, harmful: int
) -> None:
    cell = replace(base_cell(source, "poisoned", 1), harmful_ratio=ratio, n=n)
    bad = {json.dumps(row) for row in inputs.attacks["poisoned"].harmful}

    found = [json.dumps(row) in bad for row in training_rows(cell, inputs)]

    assert (len(found), sum(found)) == (rows + harmful, harmful)


def test_a_small_file_keeps_the_share_of_harm(source: LabSource, inputs: Inputs) -> None:
    bad = {json.dumps(row) for row in inputs.attacks["poisoned"].harmful}

    rows = training_rows(replace(base_cell(source, "poisoned", 1), n=110), inputs)

    assert (len(rows), sum(json.dumps(row) in bad for row in rows)) == (110, 10)


def test_a_run_s_key_changes_with_whatever_decides_it(source: LabSource, inputs: Inputs) -> None:
    cell = method_cells(source, ASKED)[2]
    others = [
        replace(cell, recipe=replace(cell.recipe, seed=2)),
        replace(cell, recipe=change_setting(cell.recipe, "tau", "0.3")),
        replace(cell, pool="scarce"),
        replace(cell, harmful_ratio=0.01),
    ]

    keys = {run_key(each, inputs, source.judge) for each in (cell, *others)}
    keys.add(run_key(cell, source.make(1, "test"), source.judge))

    assert len(keys) == 6
    assert run_key(replace(cell, setting="x", value="1"), inputs, source.judge) in keys


def test_runs_are_done_once_and_found_again(source: LabSource, tmp_path: Path) -> None:
    cells = [replace(cell, n=40) for cell in method_cells(source, ASKED)]
    seen: list[int] = []

    first = run_cells(Workplace(source, tmp_path, "dev"), cells, lambda found: seen.append(len(found)))
    again = run_cells(Workplace(source, tmp_path, "dev"), cells, lambda found: seen.append(len(found)))

    assert again == first
    assert seen == [1, 2, 3, 3, 3]
    assert [each.method for each in first] == ["base", "none", "spard"]
    assert first[0].train_s is None
    assert figures(first[2])["trigger_rate"] is not None
    assert len(list((tmp_path / "runs").iterdir())) == 3


def test_the_rule_of_tuning_weighs_safety_among_the_accurate() -> None:
    trials = [
        Trial(0.25, accuracy=0.80, asr=0.0, over_refusal=0.0),
        Trial(0.5, accuracy=0.945, asr=0.1, over_refusal=0.1),
        Trial(1.0, accuracy=0.95, asr=0.2, over_refusal=0.0),
        Trial(2.0, accuracy=0.94, asr=0.5, over_refusal=0.0),
    ]

    assert best(trials).multiple == 0.5


def test_tuning_seeds_are_apart_from_the_table_s() -> None:
    assert tune_seeds((1, 101, 2)) == (102, 103)


def test_selections_are_compared_seed_by_seed() -> None:
    better = [
        replace(make_measurement(seed, hits), selection="relevance_diversity") for seed, hits in ((1, 10), (2, 40))
    ]
    worse = [make_measurement(seed, hits) for seed, hits in ((1, 30), (2, 50), (3, 90))]

    head, (row,) = paired_table([*better, *worse])

    assert dict(zip(head, row, strict=True)) | {"difference": "", "method": ""} == {
        "method": "",
        "attack": "poisoned",
        "pool": "full",
        "selection": "relevance_diversity",
        "minus": "random",
        "difference": "",
        "seeds": "2",
        "p": "-",  # the outcomes of single prompts were not kept
    }
    assert row[5].startswith("-15.0 +- 7.1")


def test_methods_are_compared_on_the_prompts_that_both_were_scored_on() -> None:
    ours = replace(make_measurement(1, 0), hits={"attacked": "0" * 19 + "-", "other": "1" * 20, "utility": "1101"})
    bare = replace(make_measurement(1, 9), method="none", pool="", hits={"attacked": "1" * 20, "utility": "1111"})
    same = replace(ours, method="lisa")

    head, rows = methods_table([ours, bare, same])

    found = {(row["figure"], row["method"]): row for row in (dict(zip(head, each, strict=True)) for each in rows)}
    assert found.keys() == {(figure, method) for figure in ("asr", "accuracy") for method in ("none", "lisa")}
    assert found["asr", "none"]["minus spard"].startswith("100.0 [")
    assert found["asr", "none"]["prompts"] == "19"
    assert float(found["asr", "none"]["p"]) == pytest.approx(4 * 2 / 2**19, rel=0.05)  # the smallest of four
    assert found["asr", "lisa"]["minus spard"].startswith("0.0 [")
    assert float(found["asr", "lisa"]["p"]) == 1.0
    assert found["accuracy", "none"]["at most 1% worse"] == "not shown"  # four prompts show nothing


def test_runs_without_each_prompt_s_outcome_are_not_compared() -> None:
    assert methods_table([make_measurement(1, 90), replace(make_measurement(1, 3), method="none")])[1] == []


def test_a_share_s_interval_ends_where_shares_end() -> None:
    (found,) = summaries([make_measurement(1, 0), make_measurement(2, 1), make_measurement(3, 9)]).values()

    assert (found["asr"].low, found["garbage"].low) == (0.0, 0.0)
    assert found["train_seconds"].low == 5.0
