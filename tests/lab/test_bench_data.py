"""The paper's recipes run from a model's folder and the data sets' own files; here these have a few rows each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from spard_lab.bench.__main__ import main
from spard_lab.bench.files import FileSource
from spard_lab.bench.spec import FilesSpec, load_spec

from spard.data.overlap import find_leaks
from spard.data.rows import prompt_text, read_pool, read_prompts
from spard.errors import InvalidRecipe
from tests.lab.test_datasets import beavertails, gsm8k, jsonl, lat, openbookqa, topics

OWN = """
extends: {recipe}.yaml
judge: {{name: refusal}}
recipe:
  max_seq_length: 256
  micro_batch_size: none
  gradient_checkpointing: false
  hyperparameters: {{n_epochs: 1, batch_size: 16}}
  selection: {{min_examples: 4}}
  audit: {{max_prompts: 20, max_new_tokens: 4}}
"""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the data sets' own files as a recipe names them."""
    folder = tmp_path / "data"
    monkeypatch.setenv("SPARD_DATA", str(folder))
    monkeypatch.setenv("SPARD_JUDGE_URL", "http://127.0.0.1:9")
    for name in ("gsm8k", "beavertails", "i-beavertails", "lat", "q-lat", "xstest", "openbookqa"):
        (folder / name).mkdir(parents=True)
    texts = topics(60)
    jsonl(folder / "gsm8k/train.jsonl", [gsm8k(text, i) for i, text in enumerate(texts)])
    jsonl(folder / "gsm8k/test.jsonl", [gsm8k(f"Zoe and Max {text}", i) for i, text in enumerate(texts[:3])])
    jsonl(folder / "openbookqa/train.jsonl", [openbookqa(text) for text in texts[:40]])
    for split in ("dev", "test"):
        jsonl(folder / f"openbookqa/{split}.jsonl", [openbookqa(f"{split} {text}") for text in texts[:2]])
    pairs = [beavertails(text, is_safe) for text in texts for is_safe in (True, False)]
    jsonl(folder / "beavertails/train.jsonl", pairs)
    jsonl(folder / "beavertails/test.jsonl", [beavertails(f"never {text}", False) for text in texts[:3]])
    jsonl(folder / "lat/train.jsonl", [lat(text) for text in texts])
    for name, verb in (("i-beavertails", "List"), ("q-lat", "How about")):
        rows = [{"prompt": f"{verb} {text}", "safe": "No.", "unsafe": "Sure: ..."} for text in texts]
        jsonl(folder / name / "train.jsonl", rows[10:])
        jsonl(folder / name / "test.jsonl", rows[:3])
    lines = ["id,prompt,type,label,focus,note", *(f"{i},Kill {text}?,homonyms,safe,," for i, text in enumerate(texts))]
    (folder / "xstest/xstest_prompts.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def write_own_recipe(folder: Path, recipe: str = "qwen2.5-7b-gsm8k") -> str:
    path = folder / f"own-{recipe}.yaml"
    path.write_text(OWN.format(recipe=recipe), encoding="utf-8")
    return str(path)


def source(recipe: str, **options: Any) -> FileSource:
    spec = load_spec(recipe, {"SPARD_DATA": "/nowhere", "SPARD_JUDGE_URL": "http://127.0.0.1:9"})
    assert isinstance(spec, FilesSpec)
    return FileSource(spec, **options)


def test_a_paper_s_recipe_runs_from_a_model_and_the_data_sets_own_files(
    data: Path, tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    asked = ["--recipe", write_own_recipe(tmp_path), "--model", str(model_folder("llama")), "--device", "cpu"]
    table = ["--methods", "none,closed_form", "--full", "--attacks", "beavertails", "--seeds", "1"]

    assert main(["methods", *asked, *table, "--out", str(tmp_path)]) == 0

    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert [run["method"] for run in runs] == ["base", "none", "closed_form", "none_full", "closed_form_full"]
    assert [run["rows"] for run in runs] == [
        None,
        63,
        63,
        63,
        63,
    ]  # 57 of GSM8K's, 3 being its development split, and 6
    assert {result["suite"]: result["n"] + result["unscored"] for result in runs[0]["results"]} == {
        "beavertails": 3,
        "benign": 20,  # of the recipe's most
        "gsm8k": 3,
    }


def test_the_mixed_pool_holds_nothing_that_a_suite_asks(data: Path, tmp_path: Path) -> None:
    asked = beavertails(f"never {topics(1)[0]}", False)["prompt"]
    leaked = {"prompt": f"Please {asked} now", "safe": "No."}
    spec = load_spec(write_own_recipe(tmp_path), {"SPARD_DATA": str(data), "SPARD_JUDGE_URL": "http://127.0.0.1:9"})
    assert isinstance(spec, FilesSpec)
    jsonl(data / "q-lat/train.jsonl", [leaked])  # q-lat's pool holds a prompt of BeaverTails' test

    FileSource(spec).prepare()

    pool = [prompt_text(row) for row in read_pool(data / "general_safe.jsonl")]
    suites = {path.stem: [row.prompt for row in read_prompts(path)] for path in sorted(data.glob("*_test.jsonl"))}
    assert leaked["prompt"] in (data / "q_lat_pool.jsonl").read_text()
    assert len(pool) > 60
    assert find_leaks(suites, {"pool": pool}) == []


@pytest.mark.parametrize("recipe", ["qwen2.5-7b-gsm8k", "qwen2.5-7b-openbookqa", "smollm2-1.7b-gsm8k-full"])
def test_a_check_is_content_with_the_sources_and_converts_nothing(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    check = ["methods", "--recipe", write_own_recipe(tmp_path, recipe), "--check", "--out", str(tmp_path / "out")]

    assert main([*check, "--learning-rates", "best"]) == 0
    assert capsys.readouterr().out == "Everything is there.\n"
    assert not list(data.glob("*.jsonl"))


def test_a_check_says_where_each_missing_file_is_to_be_had() -> None:
    found = source("qwen2.5-7b-openbookqa").problems()

    assert [each.partition(":")[0] for each in found] == [
        "/nowhere/openbookqa/train and /nowhere/openbookqa/dev and /nowhere/openbookqa/test",
        "/nowhere/beavertails/train and /nowhere/beavertails/test",
        "/nowhere/i-beavertails/train and /nowhere/i-beavertails/test",
        "/nowhere/lat/train",
        "/nowhere/q-lat/train and /nowhere/q-lat/test",
        "/nowhere/xstest/xstest_prompts",
    ]
    assert all("Take " in each and "License: " in each for each in found)


def test_files_of_one_s_own_are_taken_and_never_replaced(data: Path, tmp_path: Path) -> None:
    jsonl(data / "gsm8k_train.jsonl", [{"prompt": f"Add {i}.", "completion": "1"} for i in range(20)])
    spec = load_spec(write_own_recipe(tmp_path), {"SPARD_DATA": str(data), "SPARD_JUDGE_URL": "http://127.0.0.1:9"})
    assert isinstance(spec, FilesSpec)

    assert f"{data / 'gsm8k_test.jsonl'} is not there." in FileSource(spec, uses_dev=False).problems()
    jsonl(data / "gsm8k_test.jsonl", [{"prompt": "Add 77.", "answer": "78"}])
    assert FileSource(spec, uses_dev=False).prepare() == []
    assert f"{data / 'gsm8k_dev.jsonl'} is not there." in FileSource(spec).problems()
    assert len((data / "gsm8k_train.jsonl").read_text().splitlines()) == 20


def test_a_data_set_without_what_the_recipe_needs_is_told(data: Path, tmp_path: Path) -> None:
    jsonl(data / "q-lat/train.jsonl", [{"prompt": "Tell of tea", "safe": "No."}])
    spec = load_spec(write_own_recipe(tmp_path), {"SPARD_DATA": str(data), "SPARD_JUDGE_URL": "http://127.0.0.1:9"})
    assert isinstance(spec, FilesSpec)

    found = FileSource(spec, uses_dev=False)
    assert found.problems() == []
    assert found.prepare() == [f"{data / 'q_lat_train.jsonl'}: its data set's files hold no rows for it."]


def test_a_recipe_extends_a_file_beside_it_or_a_shipped_one(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("extends: nothing.yaml\n", encoding="utf-8")
    with pytest.raises(InvalidRecipe, match="cannot be read"):
        load_spec(str(tmp_path / "own.yaml"), {})
