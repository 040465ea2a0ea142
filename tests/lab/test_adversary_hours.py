"""The hours of the adversary's bench are told before it starts: by rounds that were played, else by a small probe."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from spard_lab.adversary.base import all_attacks
from spard_lab.adversary.lab import LabArena
from spard_lab.bench.__main__ import main
from spard_lab.bench.adversary import __main__ as command
from spard_lab.bench.adversary import hours
from spard_lab.bench.adversary.hours import (
    ArmHours,
    Probe,
    Setup,
    count_prompts,
    count_steps,
    estimate_hours,
    hours_table,
)
from spard_lab.bench.adversary.rounds import REPLY_TOKENS, Bench, Round, build_match, round_key
from spard_lab.bench.measure import write_run
from spard_lab.bench.methods import method_recipe
from spard_lab.bench.spec import LabSpec

from spard.config import JudgeSpec
from spard.data.rows import Prompt
from spard.models.base import Base
from tests.lab.test_adversary_bench import FEW_STEPS
from tests.spard.parts import ANY_BASE, TINY_PLAN

ATTACKS = all_attacks()


@pytest.fixture
def bench(lab: Path, tmp_path: Path) -> Bench:
    """Two attacks on two arms and two seeds, of which one has a lab: `later_turn` is not possible there."""
    shutil.copytree(lab, tmp_path / "labs" / "seed-1")
    arms = {name: method_recipe(name, FEW_STEPS, {}) for name in ("none", "spard")}
    attacks = [ATTACKS[name] for name in ("plain", "ten_shot", "later_turn")]
    arena = LabArena(tmp_path / "labs", TINY_PLAN, ANY_BASE)
    return Bench(arena, arms, attacks, (1, 2), JudgeSpec(), 8, tmp_path / "out")


def test_rounds_of_another_device_are_others(bench: Bench) -> None:
    on_gpu, ground = replace(bench, device="cuda"), bench.arena.open_ground(1)
    keys = {round_key(each, build_match(each, ground, ATTACKS["plain"], 1), "spard") for each in (bench, on_gpu)}
    assert len(keys) == 2


def test_rounds_that_were_played_say_what_others_take(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probe, "setup", lambda *_: Setup(prepare_s=100.0, step_s=1.0))
    monkeypatch.setattr(Probe, "reply_s", 0.5)
    ground = bench.arena.open_ground(1)
    matches = {name: build_match(bench, ground, ATTACKS[name], 1) for name in ("plain", "ten_shot")}
    done = Round("plain", "spard", 1, "released", wall_s=40.0)
    write_run(bench.folder, round_key(bench, matches["plain"], "spard"), asdict(done))
    write_run(bench.folder, "of other settings", asdict(replace(done, wall_s=60.0)))
    steps = {
        name: [count_steps(bench.arms["none"], job) for job in each.campaign.jobs] for name, each in matches.items()
    }

    none, spard = estimate_hours(bench)

    def probe_seconds(name: str) -> float:
        return 100.0 * len(steps[name]) + sum(steps[name]) + count_prompts(matches[name], 8) * 0.5

    assert len(steps["ten_shot"]) == 2
    assert (none.rounds, none.done, none.known) == (4, 0, 0)
    assert none.seconds == pytest.approx(2 * (probe_seconds("plain") + probe_seconds("ten_shot")))
    assert (spard.rounds, spard.done, spard.known) == (4, 1, 1)
    assert spard.seconds == pytest.approx(50.0 + 2 * probe_seconds("ten_shot"))  # the mean of both, for the other seed


def test_prompts_in_a_dress_are_asked_as_well(bench: Bench) -> None:
    ground = bench.arena.open_ground(1)
    counts = {
        name: count_prompts(build_match(bench, ground, ATTACKS[name], 1), 8)
        for name in ("plain", "prefill", "honest_law")
    }
    assert counts == {"plain": 3 * 8, "prefill": 5 * 8, "honest_law": 4 * 8}  # at half of the steps too


def test_the_table_ends_with_the_sum() -> None:
    found = [ArmHours("none", 4, 1, 1, 20, 1800.0), ArmHours("spard", 4, 0, 0, 30, 5400.0)]
    assert hours_table(found)[1][-1] == ["all", "8", "1", "1", "50", "2.00"]


def test_the_command_probes_and_plays_no_round(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "open_arena", lambda recipe, spec, folder: bench.arena)
    monkeypatch.setattr(command, "load_spec", lambda name, environment: LabSpec(recipe=FEW_STEPS))
    monkeypatch.setattr(hours, "REPLY_TOKENS", 2)
    line = ["adversary", "--recipe", "lab", "--out", str(bench.folder), "--seeds", "1", "--attacks", "ten_shot"]

    assert main([*line, "--methods", "none", "--prompts", "8", "--estimate"]) == 0

    text = capsys.readouterr().out
    assert text.startswith("An estimate on ")
    assert "| none | 1 | 0 | 0 | " in text
    assert not (bench.folder / "runs").exists()
    assert not (bench.folder / "result.json").exists()


def test_a_lab_that_is_not_made_is_not_made_for_an_estimate(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def reply_seconds(base: Base, prompts: Sequence[Prompt], limit: int) -> float:
        asked.append(limit)
        return 0.5

    monkeypatch.setattr(hours, "reply_seconds", reply_seconds)
    # `subliminal` and `many_triggers` ask the base model when they are built.
    attacks = [ATTACKS[name] for name in ("plain", "subliminal", "many_triggers")]
    arms = {name: method_recipe(name, FEW_STEPS, {}) for name in ("spard", "spard+tau=0.3", "none")}

    found = estimate_hours(replace(bench, arms=arms, attacks=attacks, seeds=(2, 1)))

    assert not (bench.folder.parent / "labs" / "seed-2").exists()
    assert [(each.rounds, each.known) for each in found] == [(6, 0)] * 3
    assert all(each.seconds > 0 for each in found)
    assert 0 < asked[0] < REPLY_TOKENS  # an untrained model does not end its replies by itself


def test_arms_with_the_same_defense_share_one_timing_when_it_gets_long(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[str] = []

    def time_setup(probe: Probe, method: str) -> Setup:
        timed.append(method)
        return Setup(100.0, 1.0)

    monkeypatch.setattr(Probe, "_time_setup", time_setup)
    monkeypatch.setattr(Probe, "reply_s", 0.5)
    monkeypatch.setattr(hours, "TIMING_S", 0.0)
    arms = {name: method_recipe(name, FEW_STEPS, {}) for name in ("spard", "none", "spard+tau=0.3")}

    found = {each.method: each for each in estimate_hours(replace(bench, arms=arms, seeds=(1,)))}

    assert timed == ["spard", "none"]
    assert [each.method for each in found.values() if not each.is_timed] == ["spard+tau=0.3"]
    assert found["spard+tau=0.3"].seconds == found["spard"].seconds
    assert [row[-1][0] == "~" for row in hours_table(list(found.values()))[1]] == [False, False, True, False]


def test_the_pool_is_embedded_as_often_as_the_set_up_reads_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ground = bench.arena.open_ground(1)
    match = build_match(bench, ground, ATTACKS["plain"], 1)
    monkeypatch.setattr(Probe, "reply_s", 0.0)
    monkeypatch.setattr(Probe, "embed_s", 2.0)
    probe = Probe(bench, match)
    seconds = []
    for passes in (0, 2):
        monkeypatch.setattr(Probe, "setup", lambda *_, passes=passes: Setup(3.0, 0.0, passes, gated=5))
        seconds.append(probe.round_s(match, "spard"))
    rows = len(match.campaign.jobs[0].rows) + len(ground.pool.read_text().splitlines())
    assert seconds == [3.0, 3.0 + 2 * 2.0 * rows]
