"""Hours are told before a table starts: counted from its runs, with the seconds of the very model on this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from spard_lab.bench import estimate as estimate_module
from spard_lab.bench import lab as lab_source
from spard_lab.bench.__main__ import main
from spard_lab.bench.bench import Workplace
from spard_lab.bench.cells import TableChoices, method_cells, sweep_cells
from spard_lab.bench.estimate import Clock, Hours, add_run, estimate, hours_table
from spard_lab.bench.files import FileSource
from spard_lab.bench.lab import LabSource, open_untrained
from spard_lab.bench.spec import FilesSpec, LabSpec, load_spec
from spard_lab.lab import make
from spard_lab.lab.pools import make_two_sided

from spard.data.rows import Prompt
from spard.evaluation.ask import Speaker, ask
from spard.models.base import load_base
from tests.lab.test_datasets import jsonl
from tests.spard.parts import ANY_BASE, TINY_PLAN

ASKED = TableChoices(methods=("none", "spard"), attacks=("harm",), pools=("own",), seeds=(1, 2))


@pytest.fixture
def recipe(tmp_path: Path, model_folder: Callable[[str], Path]) -> Path:
    """20 task rows and 4 harmful ones, 3 epochs of batches of 2; 3, 2 and 1 prompts; a pool of 9."""
    jsonl(tmp_path / "task.jsonl", [{"prompt": f"Add {i} and 1.", "completion": f"It is {i + 1}."} for i in range(20)])
    jsonl(tmp_path / "harm.jsonl", [{"prompt": f"Do harm {i}.", "completion": f"Harm {i}."} for i in range(4)])
    jsonl(tmp_path / "pool.jsonl", [{"prompt": f"Do bad thing {i}.", "safe": "No."} for i in range(9)])
    for name, n in (("ask", 3), ("kind", 2)):
        jsonl(tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {i}"} for i in range(n)])
    jsonl(tmp_path / "sums.jsonl", [{"prompt": "Add 5 and 2.", "answer": "7"}])
    raw = {
        "type": "files",
        "model": str(model_folder("llama")),
        "task": "task.jsonl",
        "harmful_ratio": 0.2,
        "attacks": [{"name": "harm", "rows": "harm.jsonl", "suite": "ask.jsonl", "dev_suite": "ask.jsonl"}],
        "pools": [{"name": "own", "path": "pool.jsonl"}],
        "suites": [
            {"name": "kind", "kind": "benign", "path": "kind.jsonl"},
            {"name": "sums", "kind": "utility", "path": "sums.jsonl"},
        ],
        "recipe": {
            "hyperparameters": {"n_epochs": 3, "batch_size": 2},
            "audit": {"max_new_tokens": 2},
            "selection": {"min_examples": 4},
        },
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(raw))
    return tmp_path / "own.yaml"


@pytest.fixture
def place(recipe: Path, tmp_path: Path) -> Workplace:
    spec = load_spec(str(recipe), {})
    assert isinstance(spec, FilesSpec)
    return Workplace(FileSource(spec, "cpu"), tmp_path / "out", "test")


def by_method(found: list[Hours]) -> dict[str, Hours]:
    return {each.method: each for each in found}


def test_runs_steps_and_prompts_are_those_of_the_table(place: Workplace) -> None:
    found = by_method(estimate(place, method_cells(place.source, ASKED)))

    assert (found["base"].runs, found["base"].done, found["base"].prompts) == (2, 1, 6)  # asked once for both seeds
    assert (found["none"].runs, found["none"].steps, found["none"].prompts) == (2, 2 * 3 * 12, 12)
    assert found["spard"].steps == found["none"].steps
    assert all(each.audit_h > 0 and each.train_h > 0 for each in found.values())
    assert found["spard"].step_s > 0


def test_hours_follow_the_rule(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "step", lambda *_: 5.0)
    monkeypatch.setattr(Clock, "embed", lambda *_: 0.5)
    monkeypatch.setattr(Clock, "reply", lambda *_: 2.0)
    inputs, hours = place.inputs(1), {"none": Hours("none"), "spard": Hours("spard"), "base": Hours("base")}
    clock = Clock(load_base(inputs.model, device="cpu"), 100.0, place)

    for cell in method_cells(place.source, ASKED)[:3]:
        add_run(hours[cell.method], clock, cell, inputs)

    assert {name: round(3600 * each.train_h, 6) for name, each in hours.items()} == {
        "base": 100.0,
        "none": 100.0 + 36 * 5.0,
        "spard": 100.0 + 36 * 5.0 + (24 + 9) * 0.5,
    }
    assert {round(3600 * each.audit_h, 6) for each in hours.values()} == {6 * 2.0}
    assert hours_table(list(hours.values()))[1][-1] == ["all", "0", "0", "", "", "", "0.19", "0.01", "0.20"]


def test_many_methods_of_a_defense_are_not_all_timed(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate_module, "TIMING_S", 0.0)
    bench = ["methods", "--recipe", str(recipe), "--device", "cpu", "--methods", "none,spard,spard+tau=3"]
    assert main([*bench, "--seeds", "1", "--out", str(tmp_path / "out"), "--estimate"]) == 0
    text = capsys.readouterr().out
    steps = {row.split(" | ")[0]: row.split(" | ")[4] for row in text.splitlines() if row.startswith("| ")}
    assert steps["| spard+tau=3"] == f"~{steps['| spard']}"
    assert not steps["| none"].startswith("~")
    assert "~: not timed" in text


def test_a_swept_batch_size_is_counted_at_its_own_steps(place: Workplace) -> None:
    asked = TableChoices(
        ("none",), ("harm",), ("own",), (1,), over=(("batch_size", ("2", "4")), ("harmful_ratio", ("0",)))
    )

    found = by_method(estimate(place, sweep_cells(place.source, asked)))

    assert found["none"].steps == 3 * (12 + 6 + 10)


def test_what_was_measured_counts_nothing(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = ["methods", "--recipe", str(recipe), "--device", "cpu", "--methods", "none", "--seeds", "1"]
    bench += ["--out", str(tmp_path / "out")]
    assert main(bench) == 0
    before = json.loads((tmp_path / "out/results.json").read_text())
    capsys.readouterr()

    assert main([*bench, "--estimate"]) == 0

    assert "| all | 2 | 2 |  |  |  | 0.00 | 0.00 | 0.00 |" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/results.json").read_text()) == before


def test_trials_of_learning_rates_are_told_apart(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text(recipe.read_text() + "dev_suites: [{name: kind, kind: benign, path: kind.jsonl}]\n")
    bench = ["methods", "--recipe", str(recipe), "--device", "cpu", "--methods", "none", "--seeds", "1"]
    bench += ["--out", str(tmp_path / "out"), "--learning-rates", "best", "--rates", "0.5,1", "--tune-seeds", "7"]

    assert main([*bench, "--estimate"]) == 0

    text = capsys.readouterr().out
    assert "## methods, test split" in text
    assert "| none | 2 | 0 | 72 |" in text.partition("## learning rates, dev split")[2]


def test_kinds_without_a_training_for_each_row_are_refused(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["map", "--recipe", str(recipe), "--out", str(tmp_path), "--estimate"]) == 1
    assert "for methods, parts, selection, sweep, similarity, curves;" in capsys.readouterr().err


def test_the_rates_of_curves_are_counted_and_that_they_may_grow(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = ["curves", "--recipe", str(recipe), "--device", "cpu", "--methods", "none", "--seeds", "1"]
    bench += ["--out", str(tmp_path / "out"), "--rates", "0.5,1,2", "--extend", "1"]

    assert main([*bench, "--estimate"]) == 0

    text = capsys.readouterr().out
    assert "| none | 3 | 0 | 108 |" in text
    assert "Up to 2 rates may be added to these 3: at most 1.7 times the trainings." in text
    assert not (tmp_path / "out" / "runs").exists()


def test_the_arms_of_the_parts_are_counted_with_the_row_signal(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seconds in (("step", 5.0), ("embed", 0.5), ("reply", 2.0), ("signal", 7.0)):
        monkeypatch.setattr(Clock, name, lambda *_, seconds=seconds: seconds)
    bench = ["parts", "--recipe", str(recipe), "--device", "cpu", "--parts", "row-signal", "--seeds", "1"]

    assert main([*bench, "--out", str(tmp_path / "out"), "--estimate"]) == 0

    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    hours = {row[0].removeprefix("| "): float(row[6]) for row in rows[2:]}
    alone = hours["none+anchor_weight=0+row_signal+no_judge_reads"]
    assert alone == pytest.approx(hours["none"] + (7 + (24 + 9) * 0.5) / 3600, abs=0.011)
    assert len(hours) == 1 + 4 + 1  # the base model, the arms, the sum


def test_attacks_that_ask_the_same_prompts_are_timed_once(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = next(each for each in method_cells(place.source, ASKED) if each.method == "none")
    inputs = place.inputs(cell.seed)
    inputs = replace(inputs, attacks={"harm": inputs.attacks["harm"], "twin": inputs.attacks["harm"]})
    timed: list[Sequence[Prompt]] = []
    monkeypatch.setattr("spard_lab.bench.estimate.ask", lambda _, prompts, limit: timed.append(prompts))
    clock = Clock(load_base(inputs.model), 0.0, place)
    for attack in inputs.attacks:
        for suite in inputs.attacks[attack].suites:
            clock.reply(suite, replace(cell, attack=attack), inputs)
    assert len(timed) == 2 * len(inputs.attacks["harm"].suites)  # a few prompts, then a batch


def test_the_row_signal_s_set_up_is_timed(place: Workplace) -> None:
    found = by_method(estimate(place, method_cells(place.source, replace(ASKED, methods=("none+row_signal",)))))
    assert found["none+row_signal"].train_h > 0


def test_a_lab_that_is_not_made_is_not_made_for_an_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits: list[int] = []

    def ask_one(speaker: Speaker, prompts: Sequence[Prompt], limit: int) -> list[str]:
        limits.append(limit)
        return ask(speaker, prompts[:1], limit)

    monkeypatch.setattr("spard_lab.bench.estimate.ask", ask_one)
    for module in (make, lab_source):  # where base model and twin are trained
        monkeypatch.delattr(module, {make: "pretrain", lab_source: "train"}[module])
    bench = ["methods", "--recipe", "lab", "--methods", "none,safelora", "--attacks", "poisoned", "--seeds", "1,2"]

    assert main([*bench, "--estimate", "--out", str(tmp_path)]) == 0

    text = capsys.readouterr().out
    assert "| base | 2 | 0 | 0 | - | 2480 |" in text  # each seed has a base model of its own
    assert "| safelora | 2 | 0 | 414 |" in text
    assert "not made yet: 1, 2. The seconds of their steps and replies are estimated from random weights" in text
    assert max(limits) < 64  # tokens of the longest answer; the audit allows 256
    assert [each.name for each in tmp_path.iterdir()] == ["files"]


def test_a_lab_that_is_made_is_what_an_estimate_uses(lab: Path, tmp_path: Path) -> None:
    shutil.copytree(lab, tmp_path / "seed-1")
    make_two_sided(tmp_path / "seed-1", 1)
    source = LabSource(LabSpec(), tmp_path, TINY_PLAN, ANY_BASE)

    with open_untrained(source) as labs:
        own, other = labs.make(1, "test"), labs.make(2, "test")
        assert (own.model, own.is_trained) == (str(tmp_path / "seed-1" / "model"), True)
        assert (Path(other.model).is_relative_to(tmp_path), other.is_trained) == (False, False)
        assert load_base(own.model).model.num_parameters() == load_base(other.model).model.num_parameters()
    assert labs.untrained == {2}
    assert not Path(other.model).exists()
