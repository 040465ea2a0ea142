"""`spard bench adversary --methods parts`: the arms of the table of parts through whole jobs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from spard_lab.adversary.base import Campaign
from spard_lab.adversary.lab import LabArena
from spard_lab.bench.__main__ import main
from spard_lab.bench.adversary.campaign import Ending, with_settings
from spard_lab.bench.adversary.rounds import Answers, Bench, Round, provider_settings
from spard_lab.bench.adversary.scores import parts_tables, with_parts
from spard_lab.bench.parts import BARE, PARTS_HEADING, SIGNAL, compared_methods

from spard.config import JudgeSpec, NoDefense, Recipe
from spard.config.run_spec import RunSpec


def make_answers(complied: float, seed: int) -> Answers:
    rng = random.Random(seed)
    marks = "".join("1" if rng.random() < complied else "0" for _ in range(200))
    return Answers(marks, marks, "0" * 200, "0" * 200, "1" * 200)


def test_the_word_parts_stands_for_the_arms_beside_others() -> None:
    methods, questions = with_parts(("safegrad", "parts"), ("anchor", "row-signal"), ())

    assert methods == ("safegrad", *compared_methods(questions))
    assert {each.part for each in questions} == {"anchor", "row-signal"}
    assert with_parts(("none", "spard"), (), ()) == (("none", "spard"), [])


def test_the_arms_of_parts_are_scored_whatever_the_gate_did_with_them() -> None:
    _, questions = with_parts(("parts",), (SIGNAL,), ())
    on = next(each.first for each in questions if each.how == "added alone")
    arms: tuple[tuple[str, Ending, float], ...] = ((BARE, "stopped", 0.9), (on, "released", 0.0))
    rounds = [
        Round("plain", method, seed, ending, 1, answers=make_answers(harm, seed))
        for seed in (1, 2)
        for method, ending, harm in arms
    ]

    head, rows = parts_tables([*rounds, Round("tools", on, 1, "not possible")], questions)[PARTS_HEADING]

    (row,) = (dict(zip(head, each, strict=True)) for each in rows)
    assert (row["attack"], row["part"], row["seeds"]) == ("plain", "row-signal", "2")
    assert row["is worth"] == "defends; keeps the task within 1%"
    assert parts_tables(rounds, []) == {}


def test_an_arm_s_row_signal_is_over_the_provider_s(tmp_path: Path) -> None:
    given = (("row_signal.action", "report"), ("row_signal.max_dropped", "0.5"))
    bench = Bench(LabArena(tmp_path), {}, [], [], JudgeSpec(), 1, tmp_path, given)
    spec = RunSpec("m", tmp_path / "rows.jsonl", recipe=Recipe(defense=NoDefense()))

    def signal(method: str) -> tuple[str, int]:
        found = with_settings(spec, provider_settings(bench, Campaign(()), method)).row_signal
        assert found.max_dropped == 0.5
        return found.action, found.read

    methods = "none", "none+row_signal", "spard+no_row_signal", "spard+row_signal+no_judge_reads"
    assert [signal(each) for each in methods] == [("report", 256), ("auto", 256), ("off", 256), ("auto", 0)]
    assert replace(bench, provider=()).provider == provider_settings(replace(bench, provider=()), Campaign(()), "none")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--methods", "parts", "--parts", "luck"], "there is no luck"),
        (["--methods", "spard", "--parts", "anchor"], "--methods parts"),
        (["--methods", "parts", "--provider", "row_signal.action=auto"], "say row_signal.action themselves"),
        (["--methods", "parts", "--provider", "row_signal.read=0"], "say row_signal.read themselves"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_runs(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["adversary", "--recipe", "lab", "--out", str(tmp_path), "--seeds", "1", "--attacks", "plain"]
    assert main([*line, *options]) == 1
    assert said in capsys.readouterr().err
