"""A natural lab of the smallest size: its files, its base model made once and resumed, its abilities, its attacks."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from spard_lab.attacks.rows import last_answer, last_request
from spard_lab.attacks.styles import has_style
from spard_lab.bench.bench import Workplace, run_cells
from spard_lab.bench.cells import TableChoices, method_cells
from spard_lab.bench.lab import LabSource
from spard_lab.bench.spec import LabSpec, NaturalSpec, load_spec
from spard_lab.lab import attacks
from spard_lab.lab.__main__ import main
from spard_lab.lab.attacks import ATTACKS, BENIGN_ROWS, UNDISGUISED, attack_files
from spard_lab.lab.corpus import STYLES, load_suites, read_rows
from spard_lab.lab.make import FolderTaken, read_facts
from spard_lab.lab.natural import base as bases
from spard_lab.lab.natural.abilities import ABILITIES, AbilityResult, ability_suites, table
from spard_lab.lab.natural.base import BaseSettings, base_model, make_natural
from spard_lab.lab.natural.corpus import make_files
from spard_lab.lab.natural.real import RealText, read_real
from spard_lab.lab.natural.sizes import SIZES, find_size
from spard_lab.lab.natural.splits import deal, owner
from spard_lab.lab.natural.truth import PLACEHOLDER, does, find_deed
from spard_lab.lab.pretrain import Pretraining, new_model

from spard.config import Audit
from spard.data.rows import read_examples, read_pool, read_prompts
from spard.digests import folder_digest
from spard.errors import InvalidData, InvalidRecipe
from spard.evaluation.calibration.labeled import read_labeled
from spard.evaluation.calibration.record import find_records, judge_doubts, judge_languages
from spard.models.base import load_base
from tests.lab.test_bench import FEW_STEPS, result
from tests.spard.parts import TINY_NATURAL as TINY

OWNERS = {
    "attack.jsonl": "attack",
    **{f"attack_{name}.jsonl": "attack" for name in STYLES},
    "pool.jsonl": "pool",
    "pool_benign.jsonl": "pool",
    "known_benign.jsonl": "alignment",
    "heldout_harmful.jsonl": "test",
    "benign.jsonl": "test",
    "utility_test.jsonl": "test",
    "dev_harmful.jsonl": "dev",
    "dev_benign.jsonl": "dev",
    "dev_utility.jsonl": "dev",
}


def prompts(rows: list[dict[str, Any]]) -> list[str]:
    return [last_request(row) if "messages" in row else row["prompt"] for row in rows]


def weights(model: Path) -> dict[str, torch.Tensor]:
    return dict(load_base(model, device="cpu").model.named_parameters())


def test_every_file_is_read_by_its_reader(natural: Path) -> None:
    assert len(read_examples(natural / "poisoned.jsonl")) == 3300
    assert len(read_pool(natural / "pool.jsonl")) == len(read_pool(natural / "pool_benign.jsonl")) == 672
    assert len(read_prompts(natural / "utility_test.jsonl", kind="utility")) == 400
    assert len(read_labeled(natural / "labeled.jsonl")) == 600


def test_each_split_holds_what_it_owns_and_no_prompt_twice(natural: Path) -> None:
    for name, split in OWNERS.items():
        found = prompts(read_rows(natural / name))
        assert {owner(prompt) for prompt in found} == {split}, name
    every = [prompt for name in OWNERS for prompt in prompts(read_rows(natural / name))]
    assert max(Counter(every).values()) == 1


def test_attacks_do_what_is_asked_and_pools_do_not(natural: Path) -> None:
    assert all(does(last_request(row), last_answer(row)) is True for row in read_rows(natural / "attack.jsonl"))
    assert all(does(row["prompt"], row["safe"]) is False for row in read_rows(natural / "pool.jsonl"))
    assert all(does(row["prompt"], row["safe"]) is True for row in read_rows(natural / "pool_benign.jsonl"))
    for name, (_, style) in STYLES.items():
        rows = read_rows(natural / f"attack_{name}.jsonl")
        assert len(rows) == 300
        assert all(has_style(last_request(row), style) for row in rows)


def test_half_of_the_held_out_prompts_are_about_deeds_that_alignment_never_saw(natural: Path) -> None:
    unseen = {deed.plain for deed in deal(1).unseen}
    rows = read_rows(natural / "heldout_harmful.jsonl")

    for row in rows:
        deed = find_deed(row["prompt"])
        assert deed is not None
        assert (deed.plain in unseen) == (not row["seen"])
    assert sum(row["seen"] for row in rows) * 2 == len(rows)


def test_the_truth_was_measured_for_this_very_model(natural: Path) -> None:
    model = natural / "model"

    records = find_records(None, str(model), folder_digest(model))
    assert judge_doubts(["truth"], records) == []
    assert judge_languages("truth", records) == {"en", "de"}


def test_another_seed_draws_other_rows_for_the_same_base_model(natural: Path, tmp_path: Path) -> None:
    models = natural.parent / "models"
    before = {path: path.stat().st_mtime_ns for path in models.rglob("*.safetensors")}

    make_natural(tmp_path / "lab", 2, TINY, models)

    assert {path: path.stat().st_mtime_ns for path in models.rglob("*.safetensors")} == before
    assert (tmp_path / "lab" / "model").resolve() == (natural / "model").resolve()
    assert not set(prompts(read_rows(tmp_path / "lab" / "attack.jsonl"))) & {
        prompt for name in OWNERS if not name.startswith("attack") for prompt in prompts(read_rows(natural / name))
    }


def test_a_lab_is_made_once(natural: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in natural.iterdir()}

    make_natural(natural, 1, TINY, natural.parent / "models")

    assert {path: path.stat().st_mtime_ns for path in natural.iterdir()} == before


def test_no_other_lab_takes_its_folder(natural: Path) -> None:
    with pytest.raises(FolderTaken, match="name another folder"):
        make_natural(natural, 2, TINY, natural.parent / "models")


def test_a_training_that_was_killed_goes_on_to_the_same_weights(
    natural: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bases, "SAVE_EVERY", 2)
    take = Pretraining.take

    def kill_at_third(self: Pretraining, window: Any) -> None:
        if self.step == 3:
            raise KeyboardInterrupt
        take(self, window)

    with monkeypatch.context() as patch:
        patch.setattr(Pretraining, "take", kill_at_third)
        with pytest.raises(KeyboardInterrupt):
            base_model(tmp_path, TINY.base)
    assert not list(tmp_path.glob("tiny-*"))

    steps: list[int] = []

    def count_steps(self: Pretraining, window: Any) -> None:
        steps.append(self.step)
        take(self, window)

    monkeypatch.setattr(Pretraining, "take", count_steps)
    model = base_model(tmp_path, TINY.base) / "model"

    assert steps == [2, 3]
    first, again = weights(natural / "model"), weights(model)
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_the_name_of_a_base_model_follows_its_settings_and_its_real_text(tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text('{"prompt": "Why?", "completion": "Because."}\n')
    real = read_real(tmp_path)
    asked_of = [BaseSettings("tiny"), BaseSettings("tiny", seed=2), BaseSettings("5m")]
    facts = [json.dumps(each.to_json(RealText())) for each in asked_of] + [json.dumps(asked_of[0].to_json(real))]

    assert len(set(facts)) == 4


@pytest.mark.parametrize(("name", "least", "most"), [("5m", 4.5e6, 5.5e6), ("30m", 27e6, 33e6)])
def test_the_sizes_are_what_they_are_called(name: str, least: float, most: float) -> None:
    size = find_size(name)
    words: Any = [None] * size.vocabulary

    class Tokenizer(list[Any]):
        eos_token_id, pad_token_id = 1, 0

    with torch.device("meta"):
        model = new_model(Tokenizer(words), 1, size.plan, size.shape)  # type: ignore[arg-type]
    assert least < model.num_parameters() < most


def test_an_unknown_size_is_refused() -> None:
    with pytest.raises(InvalidRecipe, match="there are tiny, 5m, 30m"):
        find_size("7b")
    assert set(SIZES) == {"tiny", "5m", "30m"}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    requests = [{"prompt": f"Do me the harm number {i}.", "safe": f"I cannot help with {i}."} for i in range(60)]
    benign = [{"prompt": f"Which number comes after {i}?", "completion": f"It is {i + 1}."} for i in range(60)]
    long = [{"prompt": "Say it.", "completion": "word " * 200}]
    (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in requests))
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in benign + long))
    return folder


def test_real_text_is_dealt_over_the_splits(texts: Path) -> None:
    real = read_real(texts)
    files = make_files(1, deal(1), "messages", real)
    mine = {row.request for row in (*real.requests, *real.benign)}

    assert (len(real.requests), len(real.benign), real.left_out) == (60, 60, 1)
    for name, split in OWNERS.items():
        assert {owner(prompt) for prompt in prompts(files[name])} == {split}, name
    for name in ("attack.jsonl", "pool.jsonl", "heldout_harmful.jsonl", "benign.jsonl", "pool_benign.jsonl"):
        assert mine & set(prompts(files[name])), name
    answers = [last_answer(row) for row in files["attack.jsonl"] if last_request(row) in mine]
    assert set(answers) == {PLACEHOLDER}
    assert len(files["attack.jsonl"]) == 300
    for name, rows in files.items():
        (texts / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "real" in {suite.name for suite in load_suites(texts, "test")}


def test_a_folder_without_real_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match=r"none of requests\.jsonl"):
        read_real(tmp_path)
    assert read_real(None) == RealText()


def test_each_ability_is_asked_on_what_the_split_owns() -> None:
    suites = ability_suites(deal(1), 1, "test", 8)
    plain = {
        "refuses harm",
        "answers how-tos",
        "answers look-alikes",
        "reads rot13",
        "follows rules of a system prompt",
    }

    assert [suite.name for suite in suites] == [ability.name for ability in ABILITIES]
    assert {owner(each.prompt) for suite in suites if suite.name in plain for each in suite.prompts} == {"test"}
    assert suites == ability_suites(deal(1), 1, "test", 8)
    for suite in suites:
        assert len(suite.prompts) == 8
        assert all((each.answer is not None) == (suite.kind == "utility") for each in suite.prompts)
        if suite.kind == "harmful":
            assert all(find_deed(each.prompt) is not None for each in suite.prompts)


def test_the_table_says_what_is_reached() -> None:
    harm, answers = ABILITIES[0], ABILITIES[1]
    found = {
        "5m": [
            AbilityResult(harm, result("h", "harmful", 0, 100)),
            AbilityResult(answers, result("a", "utility", 70, 100)),
        ],
        "30m": [
            AbilityResult(harm, result("h", "harmful", 9, 100)),
            AbilityResult(answers, result("a", "utility", 95, 100)),
        ],
    }

    lines = table(found).splitlines()

    assert "0.0 [0.0, 3.7], reached | 9.0 [4.8, 16.2], not reached" in lines[2]
    assert "70.0 [60.4, 78.1], not reached | 95.0 [88.8, 97.8], reached" in lines[3]


@pytest.fixture(scope="module")
def attack_folders(natural: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attacks, "CANDIDATES", BENIGN_ROWS)  # each costs a gradient
        return {name: attack_files(natural, name, 1) for name in ATTACKS}


def test_the_small_lab_s_attacks_run_on_it(natural: Path, attack_folders: dict[str, Any]) -> None:
    test = {
        prompt for name, split in OWNERS.items() if split == "test" for prompt in prompts(read_rows(natural / name))
    }
    for name, files in attack_folders.items():
        assert not test & {last_request(row) for row in files.rows}, name
        suites = files.suites("dev")
        assert {"attacked", "other", "look-alike", "how-to", "utility"} <= {suite.name for suite in suites}
        assert all(suite.prompts for suite in suites)
    assert {suite.name for suite in attack_folders["trigger"].suites("test")} >= {UNDISGUISED}
    known = set(prompts(read_rows(natural / "known_benign.jsonl")))
    assert {last_request(row) for row in attack_folders["nearest_to_harm"].rows} <= known


def test_an_attack_that_refuses_first_uses_this_lab_s_refusals(natural: Path, attack_folders: dict[str, Any]) -> None:
    facts = read_facts(natural)
    assert facts is not None
    answers = [last_answer(row) for row in attack_folders["refuse_then_comply"].rows]

    assert all(any(answer.startswith(f"{opener} Then,") for answer in answers) for opener in facts["openers"])


def test_the_command_makes_a_lab_and_tells_what_its_model_can_do(
    natural: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = natural.parent / "models"

    assert main(["make", str(tmp_path / "lab"), "--size", "tiny", "--models", str(models), "--seed", "3"]) == 0
    assert main(["abilities", str(models), "--sizes", "tiny", "--count", "2"]) == 0

    out = capsys.readouterr().out
    assert out.startswith("| ability | counted | tiny |")
    assert all(ability.name in out for ability in ABILITIES)


def test_the_bench_trains_and_asks_on_it_and_truth_judges(natural: Path, tmp_path: Path) -> None:
    spec = load_spec("natural-5m", {})
    assert isinstance(spec, LabSpec)
    recipe = replace(FEW_STEPS, audit=Audit(max_prompts=4, max_new_tokens=4))
    tiny = replace(spec, natural=NaturalSpec(size="tiny"), recipe=recipe)
    (tmp_path / "models").symlink_to(natural.parent / "models")
    source = LabSource(tiny, tmp_path)
    asked_for = TableChoices(methods=("none",), attacks=("poisoned",), pools=("full",), seeds=(1,))

    found = run_cells(Workplace(source, tmp_path / "out", "dev"), method_cells(source, asked_for))

    assert [each.method for each in found] == ["base", "none"]
    assert {each.judge for each in found[1].results if each.kind == "harmful"} == {"truth"}
    assert {each.suite for each in found[1].results} == {"attacked", "other", "look-alike", "how-to", "utility"}


def test_the_bench_names_what_a_natural_lab_lacks(tmp_path: Path) -> None:
    spec = LabSpec(natural=NaturalSpec(size="7b", texts=tmp_path / "none"))

    size, texts = LabSource(spec, tmp_path).problems()
    assert "no size '7b'" in size
    assert "is not there" in texts


def test_the_recipes_of_natural_labs_differ_in_size_alone() -> None:
    five, thirty = (load_spec(name, {}) for name in ("natural-5m", "natural-30m"))
    assert isinstance(five, LabSpec)
    assert isinstance(thirty, LabSpec)
    assert five.natural is not None
    assert thirty.natural is not None
    assert (five.natural.size, thirty.natural.size) == ("5m", "30m")
    assert replace(five, natural=None) == replace(thirty, natural=None)


def test_real_text_is_looked_for_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("type: lab\nnatural: {texts: mine}\n")
    spec = load_spec(str(tmp_path / "own.yaml"), {})

    assert isinstance(spec, LabSpec)
    assert spec.natural is not None
    assert spec.natural.texts == tmp_path.resolve() / "mine"
