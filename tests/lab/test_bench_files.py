from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml
from spard_lab.bench.__main__ import main
from spard_lab.bench.bench import Workplace, run_cells
from spard_lab.bench.cells import TableChoices, base_cell
from spard_lab.bench.files import FileSource
from spard_lab.bench.spec import FilesSpec, LabSpec, load_spec, shipped_names
from spard_lab.bench.tune import tune

from spard.config import Lora, SafeLora, Spard
from spard.data.chat import render_question
from spard.data.rows import prompt_text, read_pool
from spard.errors import InvalidRecipe
from spard.models.base import load_base
from tests.spard.parts import byte_tokenizer

MODELS = {
    "llama-3.2-3b-gsm8k": "meta-llama/Llama-3.2-3B-Instruct",
    "qwen2.5-14b-gsm8k": "Qwen/Qwen2.5-14B-Instruct",
    "qwen2.5-7b-gsm8k": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5-7b-openbookqa": "Qwen/Qwen2.5-7B-Instruct",
    "qwen3-8b-gsm8k": "Qwen/Qwen3-8B",
    "smollm2-1.7b-gsm8k-full": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, model_folder: Callable[[str], Path]) -> Path:
    """A recipe of one's own: a random model, files of a few rows, two steps of training."""
    folder = tmp_path_factory.mktemp("recipe")
    write(folder / "task.jsonl", [{"prompt": f"Add {i} and 1.", "completion": f"It is {i + 1}."} for i in range(20)])
    write(folder / "harm.jsonl", [{"prompt": f"Do harm {i}.", "completion": f"Harm {i}."} for i in range(4)])
    write(
        folder / "pool.jsonl", [{"prompt": f"Do bad thing {i}.", "safe": f"I cannot help with {i}."} for i in range(9)]
    )
    write(folder / "ask.jsonl", [{"prompt": f"Please do harm {i * 7}."} for i in range(3)])
    write(folder / "kind.jsonl", [{"prompt": f"Bake cake {i}."} for i in range(3)])
    write(folder / "sums.jsonl", [{"prompt": f"Add {i} and 2.", "answer": str(i + 2)} for i in range(3)])
    suites = [
        {"name": "kind", "kind": "benign", "path": "kind.jsonl"},
        {"name": "sums", "kind": "utility", "path": "sums.jsonl"},
    ]
    raw = {
        "type": "files",
        "model": str(model_folder("llama")),
        "task": "task.jsonl",
        "harmful_ratio": 0.2,
        "attacks": [{"name": "harm", "rows": "harm.jsonl", "suite": "ask.jsonl", "dev_suite": "ask.jsonl"}],
        "pools": [{"name": "own", "path": "${POOL}"}],
        "suites": suites,
        "dev_suites": suites,
        "recipe": {
            "hyperparameters": {"n_epochs": 1, "batch_size": 12},
            "audit": {"max_new_tokens": 4},
            "selection": {"min_examples": 4},
        },
    }
    (folder / "own.yaml").write_text(yaml.safe_dump(raw))
    return folder / "own.yaml"


def test_every_shipped_recipe_is_read() -> None:
    specs = {name: load_spec(name, {}) for name in shipped_names()}

    assert isinstance(specs.pop("lab"), LabSpec)
    assert {name: spec.model for name, spec in specs.items() if isinstance(spec, FilesSpec)} == MODELS


@pytest.mark.parametrize("name", MODELS)
def test_the_paper_s_settings_are_the_paper_s(name: str) -> None:
    spec = load_spec(name, {"SPARD_DATA": "/data"})
    assert isinstance(spec, FilesSpec)
    asked, selection = spec.recipe.hyperparameters, spec.recipe.selection

    assert spec.harmful_ratio == 0.1
    assert len(spec.attacks) == 4
    assert (selection.method, selection.ratio, selection.beta) == ("relevance_diversity", 0.03, 4)
    assert selection.size(8220, 10_000) == 247
    assert (asked.batch_size, spec.recipe.micro_batch_size, spec.recipe.learning_rate) == (128, 32, 5e-5)
    assert asked.n_epochs == (3 if name.endswith("openbookqa") else 10)
    assert spec.recipe.lora == (None if name.endswith("full") else Lora(32, 4, 0.05, PROJECTIONS))
    assert (spec.judge.name, spec.judge.model) == ("llm", "gpt-4o-mini")


@pytest.mark.parametrize("name", MODELS)
def test_algorithm_1_has_the_paper_s_numbers(name: str) -> None:
    spec = load_spec(name, {"SPARD_DATA": "/data"})
    assert isinstance(spec, FilesSpec)

    named = FileSource(spec).defenses(1)
    published: dict[str, Any] = {"tau": 0.2, "delta": 0.1, "constraint": "mean", "anchor_weight": 0, "augment": ()}
    assert named["closed_form"] == Spard(variant="closed_form", eta_safe=5e-5, safe_batch_size=1, **published)
    assert named["reference"] == Spard(variant="reference", eta_safe=1, safe_batch_size=4, **published)


def test_safelora_knows_the_model_before_its_alignment() -> None:
    spec = load_spec("qwen2.5-7b-gsm8k", {})
    assert isinstance(spec, FilesSpec)

    assert FileSource(spec).defenses(1)["safelora"] == SafeLora(base_unaligned="Qwen/Qwen2.5-7B")


def test_a_check_names_every_variable_and_file_that_is_missing(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POOL", raising=False)
    broken = recipe.with_name("broken.yaml")
    broken.write_text(recipe.read_text().replace("task.jsonl", "nowhere.jsonl"))

    status = main(["methods", "--recipe", str(broken), "--check", "--out", str(tmp_path)])

    assert status == 1
    assert capsys.readouterr().out.splitlines() == [
        "Set the variable POOL.",
        f"{recipe.with_name('nowhere.jsonl')} is not there.",
    ]


def test_too_few_harmful_rows_are_told_before_a_run(recipe: Path) -> None:
    spec = load_spec(str(recipe), {"POOL": "pool.jsonl"})
    assert isinstance(spec, FilesSpec)

    found = FileSource(replace(spec, harmful_ratio=0.5)).problems()

    assert found == ["Attack harm has 4 rows; a harmful ratio of 0.5 asks for 10."]


def test_unknown_recipes_and_settings_are_refused(recipe: Path) -> None:
    wrong = recipe.with_name("wrong.yaml")
    wrong.write_text(recipe.read_text() + "color: red\n")

    for name in ("nothing", str(wrong)):
        with pytest.raises(InvalidRecipe):
            load_spec(name, {})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("methods", ["--methods", "none,ptst,spard"]),
        ("parts", ["--parts", "anchor"]),
        ("curves", ["--methods", "none", "--rates", "0.5,1", "--extend", "1"]),
        ("selection", ["--methods", "spard", "--selections", "random,max_quality"]),
        ("sweep", ["--over", "tau=0.1,auto", "--over", "n=6,12"]),
        ("similarity", ["--methods", "safeinstr", "--levels", "2"]),
        ("overhead", ["--methods", "spard", "--rounds", "2", "--steps", "1"]),
        ("map", ["--selections", "random"]),
    ],
)
def test_every_kind_leaves_tables_and_a_page(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: list[str]
) -> None:
    monkeypatch.setenv("POOL", "pool.jsonl")
    rows = {"methods": 4, "selection": 3, "sweep": 5, "similarity": 3, "overhead": 4, "map": 0}
    rows |= {"parts": 7, "curves": 4}

    status = main([kind, "--recipe", str(recipe), "--seeds", "1", "--out", str(tmp_path), "--device", "cpu", *options])

    assert status == 0
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 1 + rows[kind]
    assert json.loads((tmp_path / "results.json").read_text())["kind"] == kind
    assert f"spard bench {kind}" in (tmp_path / "results.md").read_text()
    assert "<svg" in (tmp_path / "index.html").read_text()


def test_overhead_is_told_by_batch_size_and_length_of_the_pool_s_prompts(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POOL", "pool.jsonl")
    asked = ["--methods", "spard+two_sided", "--rounds", "1", "--steps", "1", "--seeds", "1", "--device", "cpu"]

    places = ["--batch-sizes", "2", "--prompt-tokens", "60,120"]
    assert main(["overhead", "--recipe", str(recipe), "--out", str(tmp_path), *asked, *places]) == 0

    found = json.loads((tmp_path / "results.json").read_text())["overhead"]
    assert [(each["place"], each["method"]) for each in found] == [
        (f"batch 2, prompts of {tokens} tokens", method)
        for tokens in (60, 120)
        for method in ("none", "spard+two_sided")
    ]
    assert all(each["median"] == 1.0 for each in found if each["method"] == "none")
    tokenizer = byte_tokenizer()
    lengths = [
        [len(render_question(tokenizer, prompt_text(row))) for row in read_pool(path)]
        for path in (tmp_path / "pools").iterdir()
    ]
    assert sorted(round(fmean(each), -1) for each in lengths) == [60, 120]


def test_tuning_records_every_trial(recipe: Path, tmp_path: Path) -> None:
    spec = load_spec(str(recipe), {"POOL": "pool.jsonl"})
    assert isinstance(spec, FilesSpec)
    asked = TableChoices(methods=("none",), attacks=("harm",), pools=("own",), seeds=(101, 102))

    chosen = tune(Workplace(FileSource(spec, "cpu"), tmp_path, "dev"), asked, (0.5, 1.0), extend=0)

    record = json.loads((tmp_path / "tuning.json").read_text())
    assert record["methods"]["none"]["multiple"] == chosen["none"]
    assert [trial["multiple"] for trial in record["methods"]["none"]["trials"]] == [0.5, 1.0]
    assert len(list((tmp_path / "runs").iterdir())) == 4


def test_a_base_model_is_asked_once_for_all_seeds(recipe: Path, tmp_path: Path) -> None:
    spec = load_spec(str(recipe), {"POOL": "pool.jsonl"})
    assert isinstance(spec, FilesSpec)
    source = FileSource(spec, "cpu")

    found = run_cells(Workplace(source, tmp_path, "test"), [base_cell(source, "harm", seed) for seed in (1, 2)])

    assert [each.seed for each in found] == [1, 2]
    assert found[0].results == found[1].results
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_training_that_diverges_leaves_an_empty_row(
    recipe: Path, tmp_path: Path, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POOL", "pool.jsonl")
    hot, base = tmp_path / "hot", load_base(model_folder("llama"), device="cpu")
    base.model.lm_head.weight.data.fill_(float("inf"))
    base.model.save_pretrained(hot)
    base.tokenizer.save_pretrained(hot)
    own = recipe.with_name("hot.yaml")
    own.write_text(recipe.read_text().replace(str(model_folder("llama")), str(hot)))

    status = main(["methods", "--methods", "none", "--recipe", str(own), "--seeds", "1", "--out", str(tmp_path)])

    row = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))[1]
    assert status == 0
    assert (row["method"], row["asr"], row["asr_n"], row["garbage"]) == ("none", "", "0", "")
