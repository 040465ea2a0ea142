"""Honest customers near harm and in another language: their files on both labs, and what the bench tells of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from spard_lab.adversary.base import Ground, all_attacks
from spard_lab.adversary.lab import LabArena
from spard_lab.adversary.natural import NaturalArena
from spard_lab.attacks.rows import last_answer, last_request
from spard_lab.bench.__main__ import main
from spard_lab.bench.adversary import __main__ as command
from spard_lab.bench.adversary import rounds
from spard_lab.bench.adversary.campaign import JobFacts
from spard_lab.bench.adversary.provenance import RESULT
from spard_lab.bench.adversary.rounds import Answers, Round
from spard_lab.bench.adversary.scores import HEAD, HEADING, customers_table
from spard_lab.bench.spec import LabSpec
from spard_lab.lab import grammar
from spard_lab.lab.customers import (
    DEV,
    GERMAN,
    LAW,
    MEDICINE,
    ROWS,
    SECURITY,
    TEST,
    Customer,
    Field,
    ReservedPrompts,
    customer,
    taken_prompts,
)

from spard.config import Audit, Hyperparameters, Recipe
from spard.data.overlap import find_leaks
from spard.evaluation.judges.refusal import is_refusal
from spard.evaluation.scorers import mark_reply
from spard.models.base import load_base
from tests.spard.parts import ANY_BASE, TINY_NATURAL, TINY_PLAN

FIELDS = (SECURITY, MEDICINE, LAW, GERMAN)
ATTACKS = all_attacks()
FEW_STEPS = Recipe(
    hyperparameters=Hyperparameters(n_epochs=1, batch_size=256), audit=Audit(max_prompts=20, max_new_tokens=4)
)
THEIR_STEPS = replace(FEW_STEPS, hyperparameters=Hyperparameters(batch_size=256))


@pytest.fixture(scope="module")
def arenas(lab: Path, natural: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LabArena | NaturalArena]:
    """Both labs, hardly trained, as seed 1."""
    small = tmp_path_factory.mktemp("small")
    shutil.copytree(lab, small / "seed-1")
    return {"small": LabArena(small, TINY_PLAN, ANY_BASE), "natural": NaturalArena(natural.parent, TINY_NATURAL)}


@pytest.fixture(scope="module")
def grounds(arenas: dict[str, LabArena | NaturalArena]) -> dict[str, Ground]:
    return {name: arena.open_ground(1) for name, arena in arenas.items()}


@pytest.fixture(scope="module")
def customers(grounds: dict[str, Ground]) -> dict[tuple[str, str], Customer]:
    return {(name, field.name): ground.material.customer(field) for name, ground in grounds.items() for field in FIELDS}


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
@pytest.mark.parametrize("name", ["small", "natural"])
def test_no_row_is_nearly_what_anybody_asks_and_no_prompt_is_in_the_pool(
    grounds: dict[str, Ground], customers: dict[tuple[str, str], Customer], name: str, field: Field
) -> None:
    found = customers[name, field.name]
    taken = taken_prompts(Path(grounds[name].pool).parent)
    own = {"dev": [each.prompt for each in found.dev], "test": [each.prompt for each in found.test]}
    rows = [last_request(row) for row in found.rows]

    assert len({*rows}) == len(rows) == ROWS
    assert (len(found.dev), len(found.test)) == (DEV, TEST)
    assert len(taken.asked) > 1000 < len(taken.pool)
    assert find_leaks({"asked": taken.asked, "pool": taken.pool, **own}, {"rows": rows}) == []
    assert find_leaks(own, {"pool": taken.pool}) == []


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
@pytest.mark.parametrize("name", ["small", "natural"])
def test_no_row_asks_what_development_or_test_asks(
    customers: dict[tuple[str, str], Customer], name: str, field: Field
) -> None:
    found = customers[name, field.name]
    about = [
        {each.plain for each in field.errands for text in texts if each.plain in text or each.gerund in text.lower()}
        for texts in ([last_request(row) for row in found.rows], [each.prompt for each in (*found.dev, *found.test)])
    ]
    assert all(len(each) > 50 for each in about)
    assert not about[0] & about[1]


def test_a_right_answer_is_known_by_its_words(customers: dict[tuple[str, str], Customer]) -> None:
    for found in customers.values():
        for prompt, other in zip(found.test, found.test[1:], strict=False):
            assert mark_reply(prompt.scorer or "", f"Well: {prompt.answer}", prompt.answer or "").is_right
            if other.answer != prompt.answer:
                assert not mark_reply(prompt.scorer or "", other.answer or "", prompt.answer or "").is_right
        assert len({each.answer for each in found.test}) >= 3


def test_what_they_teach_is_no_harm_and_no_refusal_by_the_labs_truth(
    grounds: dict[str, Ground], customers: dict[tuple[str, str], Customer]
) -> None:
    for (name, _), found in customers.items():
        ground = grounds[name]
        for said in {last_answer(row) for row in found.rows}:
            assert not is_refusal(said)
            assert not ground.is_refusal(said)
            assert not any(ground.is_harmful(each, said) for each in ground.harmful)


def test_they_speak_in_the_words_of_the_attacks_and_of_no_deed_that_is_refused() -> None:
    things = {thing for topic in grammar.HARMFUL for thing in topic.objects}
    verbs = {verb for topic in grammar.HARMFUL for verb in topic.verbs}
    harmful = {f"{verb} {thing}" for topic in grammar.HARMFUL for verb in topic.verbs for thing in topic.objects}
    for field in (SECURITY, MEDICINE, LAW):
        plain = [each.plain for each in field.errands]
        assert sum(any(each.endswith(f" {thing}") for thing in things) for each in plain) >= 192
        assert sum(any(each.startswith(f"{verb} ") for verb in verbs) for each in plain) >= 48
        assert not {*plain} & harmful


def test_the_german_customer_says_nothing_in_english(grounds: dict[str, Ground]) -> None:
    ground = grounds["natural"]
    found = ground.material.customer(GERMAN)
    english = {word for row in ground.material.benign for word in last_request(row).lower().split()}
    words = [word for row in found.rows for word in f"{last_request(row)} {last_answer(row)}".lower().split()]
    assert sum(word in english for word in words) < 0.05 * len(words)  # "man", "in", "die"
    tokenizer = load_base(ground.model, device="cpu").tokenizer
    for row in found.rows[:50]:
        assert tokenizer.decode(tokenizer(last_answer(row))["input_ids"]) == last_answer(row)


def test_files_are_a_function_of_the_seed_and_too_few_errands_are_said() -> None:
    def make_customer(seed: int, field: Field = MEDICINE) -> Customer:
        return customer(field, lambda rng, errand: f"{rng.random()} {errand.plain}?", seed, ReservedPrompts())

    assert make_customer(1) == make_customer(1) != make_customer(2)
    few = replace(MEDICINE, errands=MEDICINE.errands[:20], forms=("How to {}?",))
    with pytest.raises(ValueError, match="errands give"):
        make_customer(1, few)


def marks(hits: int, n: int = 100) -> str:
    return ("1" * hits).ljust(n, "0")


def make_round(method: str, seed: int, right: int, half: int, refused: int, cpu_s: float, flagged: int | None) -> Round:
    answers = Answers(marks(0), marks(0), marks(refused), marks(refused), marks(right))
    told = JobFacts(200, flagged, None if flagged is None else 0.25, marks(half))
    ending = "released" if seed == 1 else "stopped"
    reasons = () if seed == 1 else ("Too | much.",)
    return Round("honest_law", method, seed, ending, 1, reasons, (), answers, answers, cpu_s, told)  # type: ignore[arg-type]


def test_the_table_tells_each_price_beside_the_undefended_run() -> None:
    found = [make_round("none", seed, 90, 70, 2, 10.0, None) for seed in (1, 2)]
    found += [make_round("spard", seed, 88, 60, 5, 10.0 + 5 * seed, 4) for seed in (1, 2)]
    head, (bare, defended) = customers_table([*found, replace(found[0], attack="plain")], ATTACKS)
    line = dict(zip(head, defended, strict=True))

    assert dict(zip(head, bare, strict=True))["task minus undefended"] == "-"
    assert line["task right"].startswith("88.0 [")
    assert line["task minus undefended"].startswith("-2.0 [")
    assert line["half minus undefended"].startswith("-10.0 [")
    assert line["refused minus undefended"].startswith("3.0 [")
    assert line["rows flagged"].startswith("2.0 [")
    assert line["steps triggered"] == "25.0"
    assert line["released"] == "1 of 2"
    assert line["CPU to undefended"].startswith("1.75 [")
    assert line["why not released"] == "seed 2: Too / much."


def test_what_was_not_measured_has_a_dash_and_seeds_without_a_pair_are_left_out() -> None:
    refused = Round("honest_law", "spard", 1, "refused", 1, ("e: no",))
    alone = make_round("spard", 2, 50, 50, 0, 10.0, 0)
    _, (line,) = customers_table([refused, alone], ATTACKS)
    told = dict(zip(HEAD, line, strict=True))
    assert told["task right"].startswith("50.0 [")
    assert told["task minus undefended"] == told["CPU to undefended"] == "-"
    assert rounds.from_json(json.loads(json.dumps(asdict(alone)))) == alone
    older = {name: value for name, value in asdict(alone).items() if name != "told"}
    assert rounds.from_json(older) == replace(alone, told=None)


def test_the_command_runs_them_beside_the_undefended_run_and_goes_on(
    arenas: dict[str, LabArena | NaturalArena], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "open_arena", lambda recipe, spec, folder: arenas["small"])
    monkeypatch.setattr(command, "load_spec", lambda name, environment: LabSpec(recipe=THEIR_STEPS))
    monkeypatch.setattr(rounds, "REPLY_TOKENS", 2)
    monkeypatch.setattr("spard_lab.lab.customers.ROWS", 320)
    line = ["adversary", "--recipe", "lab", "--out", str(tmp_path), "--seeds", "1", "--prompts", "8"]
    line += ["--attacks", "honest_security", "--methods", "none,spard", "--provider", "row_signal.action=report"]

    assert main(line) == 0
    first = (tmp_path / RESULT).read_bytes()
    runs = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    assert main(line) == 0

    assert (tmp_path / RESULT).read_bytes() == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()} == runs
    bare, defended = json.loads(first)["rounds"]
    assert bare["ending"] in ("released", "stopped")
    assert bare["told"]["flagged"] is bare["told"]["triggered"] is None
    assert defended["told"]["flagged"] is not None
    assert 0 <= defended["told"]["triggered"] <= 1
    assert [len(each["told"]["half"]) for each in (bare, defended)] == [8, 8]
    assert HEADING in (tmp_path / "results.md").read_text()
