"""Ends of epochs compared: which one a run ends with, when it ends early, and that a kill changes neither."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spard.config import Ending, Hyperparameters, Recipe, resolve
from spard.config.earlier_versions import without_added
from spard.config.run_spec import parse
from spard.data.rows import Prompt
from spard.errors import InvalidRecipe, Stopped
from spard.evaluation.audit import Suite
from spard.evaluation.suites import split
from spard.models.base import Base
from spard.release.records import ComparedEpoch, EndingRecord
from spard.release.report import GateRecord, SafetyReport
from spard.training.epoch_ends import EpochEnd, EpochResult
from spard.training.train import Hooks, TrainedModel, Trainer
from tests.narrowing import require
from tests.spard.parts import refusals, sums
from tests.spard.test_train import RECIPE, TWELVE_STEPS, equal, run, stop_at_step, weights

BEST = Ending(keep="best")
FIVE = replace(RECIPE, ema=0.5, hyperparameters=Hyperparameters(n_epochs=5, batch_size=6))  # 20 steps
WORSE_LATE = {1: 3.0, 2: 1.0, 3: 2.0, 4: 1.0, 5: 1.5}  # validation losses by epoch


class Compared:
    """Measures ends of epochs as scripted, and keeps the weights that it saw."""

    def __init__(self, losses: Mapping[int, float] = WORSE_LATE, unsafe: tuple[int, ...] = ()) -> None:
        self.losses, self.unsafe = losses, unsafe
        self.seen: dict[int, dict[str, torch.Tensor]] = {}

    def __call__(self, end: EpochEnd) -> EpochResult:
        named = end.model.named_parameters()
        self.seen[end.epoch] = {name: part.detach().clone() for name, part in named if part.requires_grad}
        is_safe = end.epoch not in self.unsafe
        return EpochResult(end.epoch, end.step, is_safe, 0.0 if is_safe else 0.5, self.losses[end.epoch])


def ends(base: Base, ending: Ending, compared: Compared, recipe: Recipe = FIVE, **more: Any) -> TrainedModel:
    return run(base, replace(recipe, ending=ending), compare=compared, **more)


def test_a_run_that_gets_worse_late_ends_with_the_earlier_weights_and_with_the_earliest_of_equals(base: Base) -> None:
    compared = Compared()
    trained = ends(base, BEST, compared)
    ended = require(trained.ended)
    assert (ended.released.epoch, ended.released.step, trained.steps) == (2, 8, 20)
    assert [each.epoch for each in ended.standings] == [1, 2, 3, 4, 5]
    assert equal(weights(trained), compared.seen[2])
    assert not equal(weights(trained), compared.seen[5])


def test_safety_comes_before_the_loss(base: Base) -> None:
    assert require(ends(base, BEST, Compared(unsafe=(2, 4))).ended).released.epoch == 5


def test_comparing_leaves_no_trace_in_the_training(load: Callable[..., Base]) -> None:
    plain = run(load(), FIVE)
    last = Compared({epoch: -epoch for epoch in range(1, 6)})
    assert equal(weights(ends(load(), BEST, last)), weights(plain))
    assert plain.ended is None


@pytest.mark.parametrize("at", [5, 8, 9, 13, 20])
def test_a_run_that_is_stopped_anywhere_ends_in_the_same_bytes(
    load: Callable[..., Base], tmp_path: Path, at: int
) -> None:
    """Before the best, at its end, right after it, later, and after the last step."""
    compared = Compared()
    with pytest.raises(Stopped):
        ends(load(), BEST, compared, resume_states=tmp_path, **stop_at_step(at))
    again = ends(load(), BEST, compared, resume_states=tmp_path)
    assert equal(weights(again), compared.seen[2])
    ended = require(again.ended)
    assert (ended.released.epoch, [each.epoch for each in ended.standings]) == (2, [1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    ("ending", "released", "last"),
    [
        (Ending(keep="best", patience=1), 2, 3),
        (Ending(keep="best", patience=2), 2, 4),
        (Ending(keep="best", patience=3), 2, 5),
        (Ending(patience=1), 3, 3),
    ],
)
def test_training_ends_after_as_many_ends_of_epochs_without_a_better_one(
    base: Base, ending: Ending, released: int, last: int
) -> None:
    compared = Compared()
    trained = ends(base, ending, compared)
    ended = require(trained.ended)
    assert (ended.released.epoch, ended.standings[-1].epoch, ended.planned_epochs) == (released, last, 5)
    assert trained.steps == 4 * last
    assert equal(weights(trained), compared.seen[released])


def test_asking_if_a_run_has_ended_evaluates_nothing(base: Base) -> None:
    compared, recipe = Compared({1: 1.0, 2: 2.0}), replace(FIVE, ending=Ending(patience=1))
    hooks, resolved = Hooks(compare=compared), resolve(recipe, **TWELVE_STEPS)
    trainer = Trainer(base, sums(base), refusals(base), recipe, resolved, hooks=hooks)
    trainer.start()
    answers = []
    for _ in range(2 * trainer.steps_per_epoch):
        trainer.step()
        answers += [trainer.has_ended for _ in range(3)]
        before = len(compared.seen)
        trainer.evaluate_epoch_end()
        assert len(compared.seen) - before == (trainer.epochs_done is not None)
    assert not any(answers)
    assert trainer.has_ended


def test_a_run_that_ended_early_ends_early_again_when_it_is_resumed(load: Callable[..., Base], tmp_path: Path) -> None:
    ending = Ending(keep="best", patience=1)
    first = ends(load(), ending, Compared(), resume_states=tmp_path)
    again = ends(load(), ending, Compared(), resume_states=tmp_path)
    assert (again.steps, again.ended) == (first.steps, first.ended)
    assert equal(weights(again), weights(first))


def test_what_others_borrow_is_every_end_but_the_last_and_that_too_where_the_run_ends_with_another(
    load: Callable[..., Base],
) -> None:
    borrowed: list[int] = []
    ends(load(), BEST, Compared(), on_epoch=lambda end: borrowed.append(end.epoch))
    assert borrowed == [1, 2, 3, 4, 5]
    borrowed.clear()
    run(load(), FIVE, on_epoch=lambda end: borrowed.append(end.epoch))
    assert borrowed == [1, 2, 3, 4]


def test_standings_rank_by_safety_then_by_attacks_then_by_loss() -> None:
    safe, better = EpochResult(1, 1, True, 0.1, 2.0), EpochResult(2, 2, True, 0.2, 1.0)
    open_, worse = EpochResult(3, 3, False, 0.5, 0.1), EpochResult(4, 4, False, 0.6, 0.0)
    broken = EpochResult(5, 5, True, 0.0, math.nan)
    ranked = sorted([broken, worse, open_, safe, better], key=lambda each: each.rank)
    assert [each.epoch for each in ranked] == [2, 1, 5, 3, 4]


def test_the_default_stands_in_nothing_that_older_versions_wrote() -> None:
    assert "ending" not in without_added(asdict(RECIPE))
    assert "ending" in without_added(asdict(replace(RECIPE, ending=BEST)))
    assert parse(Recipe, {}, "recipe").ending == Ending()


@pytest.mark.parametrize("ending", [{"keep": "best"}, {"patience": 2}])
def test_full_fine_tuning_has_no_ends_to_compare(ending: dict[str, Any]) -> None:
    with pytest.raises(InvalidRecipe, match="LoRA") as caught:
        parse(Recipe, {"lora": "none", "ending": ending}, "recipe")
    assert caught.value.param == "recipe.ending"


def test_a_share_is_a_fifth_at_most_and_the_rest_is_the_gates() -> None:
    suite = Suite("all", "harmful", tuple(Prompt(str(i)) for i in range(150)))
    for most, count in ((40, 30), (25, 25)):
        left, share = split(suite, most)
        prompts = require(share).prompts
        assert (len(prompts), len(left.prompts)) == (count, 150 - count)
        assert {*left.prompts} | {*prompts} == {*suite.prompts}
    small = replace(suite, prompts=suite.prompts[:99])
    assert split(small, 40) == (small, None)


def test_a_report_reads_its_ending_back() -> None:
    epochs = (ComparedEpoch(1, 4, True, 0.0, 1.5), ComparedEpoch(2, 8, None, None, None))
    ending = EndingRecord("best", 1, 4, 2, 9, "no_better", 3, epochs)
    report = SafetyReport(gate=GateRecord("pass", ()), steps=8, ending=ending)
    raw = report.to_json()
    raw["ending"]["of_a_newer_version"] = raw["ending"]["epochs"][0]["likewise"] = 1
    assert SafetyReport.from_json(raw) == report
    assert report.released_step == 4
    assert SafetyReport.from_json({"steps": 8}).released_step == 8
    assert ending.sentence == (
        "Training ended after 2 of 9 epochs: no later one was better than the best; "
        "the weights are those of epoch 1, step 4"
    )
