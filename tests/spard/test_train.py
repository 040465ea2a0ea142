from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from spard.config import Audit, Hyperparameters, Lora, NoDefense, Recipe, Spard, resolve
from spard.errors import InvalidData, InvalidRecipe, NonFiniteLoss, Stopped
from spard.losses.cross_entropy import evaluate
from spard.models.base import Base
from spard.training.objective import safe_rows, schedule
from spard.training.run import Identity
from spard.training.train import TrainedModel, train
from tests.spard.parts import CONFIGS, away, refusals, sums

RECIPE = Recipe(
    defense=Spard(tau=4.0, safe_batch_size=3),
    lora=Lora(rank=4, dropout=0.1),
    hyperparameters=Hyperparameters(n_epochs=3, batch_size=6),
    learning_rate=5e-3,
    seed=5,
)
TWELVE_STEPS = {"rows": 24, "hidden_size": 32}


def run(base: Base, recipe: Recipe = RECIPE, **more: Any) -> TrainedModel:
    return train(base, sums(base), refusals(base), recipe, resolve(recipe, **TWELVE_STEPS), **more)


def weights(trained: TrainedModel) -> dict[str, torch.Tensor]:
    return {name: part.detach().clone() for name, part in trained.model.named_parameters() if part.requires_grad}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(part, other[name]) for name, part in one.items())


def metrics_without_speed(trained: TrainedModel) -> list[dict[str, float]]:
    return [{key: value for key, value in step.items() if key != "tokens_per_s"} for step in trained.metrics]


def stop_at_step(steps: int) -> dict[str, Any]:
    seen = []
    return {"on_step": lambda step, total, metrics: seen.append(step), "should_stop": lambda: len(seen) == steps}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_architecture_learns_with_lora(load: Callable[..., Base], architecture: str) -> None:
    recipe = replace(RECIPE, defense=NoDefense(), hyperparameters=Hyperparameters(n_epochs=5, batch_size=6))
    base = load(architecture)
    before = evaluate(base.model, sums(base), base.tokenizer.pad_token_id).loss

    trained = train(base, sums(base), [], recipe, resolve(recipe, **TWELVE_STEPS))

    assert evaluate(base.model, sums(base), base.tokenizer.pad_token_id).loss < before - 0.1
    assert all("lora" in name for name in weights(trained))


def test_full_fine_tuning_learns_with_every_parameter(base: Base) -> None:
    recipe = replace(RECIPE, lora=None, learning_rate=3e-3)
    before = evaluate(base.model, sums(base), base.tokenizer.pad_token_id).loss

    trained = run(base, recipe)

    assert evaluate(base.model, sums(base), base.tokenizer.pad_token_id).loss < before - 0.5
    assert len(weights(trained)) == len(list(base.model.parameters()))


def test_same_seed_same_adapter(load: Callable[..., Base]) -> None:
    one, two = run(load()), run(load())
    assert equal(weights(one), weights(two))
    assert metrics_without_speed(one) == metrics_without_speed(two)


def test_another_seed_gives_another_adapter(load: Callable[..., Base]) -> None:
    assert not equal(weights(run(load())), weights(run(load(), replace(RECIPE, seed=6))))


def test_the_global_generator_is_left_as_found_and_has_no_say(load: Callable[..., Base]) -> None:
    first = weights(run(load()))
    with torch.random.fork_rng():
        torch.manual_seed(99)
        before = torch.get_rng_state()
        second = weights(run(load()))
        assert torch.equal(torch.get_rng_state(), before)
    assert equal(first, second)


@pytest.mark.parametrize("variant", ["trust_region", "closed_form", "reference"])
@pytest.mark.parametrize("lora", [RECIPE.lora, None])
def test_twelve_steps_are_six_and_six_more_bit_for_bit(
    load: Callable[..., Base], tmp_path: Path, variant: Any, lora: Lora | None
) -> None:
    recipe = replace(RECIPE, defense=Spard(tau=4.0, variant=variant), lora=lora)
    whole = run(load(), recipe)

    with pytest.raises(Stopped, match="stopped after step 6 of 12"):
        run(load(), recipe, resume_states=tmp_path, **stop_at_step(6))
    resumed = run(load(), recipe, resume_states=tmp_path)

    assert equal(weights(resumed), weights(whole))
    assert metrics_without_speed(resumed) == metrics_without_speed(whole)
    assert (resumed.steps, resumed.trained_tokens) == (whole.steps, whole.trained_tokens)


def test_a_resumed_run_keeps_the_tau_of_the_base_model(load: Callable[..., Base], tmp_path: Path) -> None:
    recipe = replace(RECIPE, defense=Spard())
    with pytest.raises(Stopped):
        run(load(), recipe, resume_states=tmp_path, **stop_at_step(6))

    base = load()
    own = evaluate(base.model, refusals(base), base.tokenizer.pad_token_id)

    assert run(base, recipe, resume_states=tmp_path).tau == {"mean": own.loss, "prefix": own.prefix_loss}


def test_a_checkpoint_of_another_recipe_is_left_alone(load: Callable[..., Base], tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run(load(), resume_states=tmp_path, **stop_at_step(6))
    steps: list[int] = []

    run(
        load(), replace(RECIPE, seed=6), resume_states=tmp_path, on_step=lambda step, total, metrics: steps.append(step)
    )

    assert steps[0] == 1


def test_settings_that_change_no_number_do_not_hinder_a_resume(load: Callable[..., Base], tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run(load(), resume_states=tmp_path, **stop_at_step(6))
    steps: list[int] = []
    other = replace(RECIPE, checkpoint_every_s=1e6, audit=Audit(max_prompts=20), gradient_checkpointing=True)

    run(load(), other, resume_states=tmp_path, on_step=lambda step, total, metrics: steps.append(step))

    assert steps[0] == 7


def test_a_run_goes_on_that_an_older_version_had_checkpointed_and_named_otherwise(
    load: Callable[..., Base], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, steps = replace(RECIPE, gradient_checkpointing=True), list[int]()
    with monkeypatch.context() as older:
        older.setattr(Identity, "digest", property(partial(Identity._digest, checkpointing=True)))
        with pytest.raises(Stopped):
            run(load(), recipe, resume_states=tmp_path, **stop_at_step(6))
    run(load(), recipe, resume_states=tmp_path, on_step=lambda step, total, metrics: steps.append(step))
    assert steps[0] == 7


def test_checkpoints_are_written_by_the_clock(base: Base, tmp_path: Path) -> None:
    saved: list[int] = []
    recipe = replace(RECIPE, checkpoint_every_s=1e-9)
    run(base, recipe, resume_states=tmp_path, on_saved=lambda state, metrics: saved.append(state.step))
    assert saved == list(range(1, 13))


def test_tau_auto_is_the_base_models_own_safe_loss(base: Base) -> None:
    own = evaluate(base.model, refusals(base), base.tokenizer.pad_token_id)
    trained = run(base, replace(RECIPE, defense=Spard(constraint="prefix")))
    assert trained.tau == {"prefix": own.prefix_loss}


def test_a_constraint_that_is_never_violated_changes_nothing(load: Callable[..., Base]) -> None:
    defended = run(load(), replace(RECIPE, defense=Spard(tau=20.0, anchor_weight=0.0)))
    plain = run(load(), replace(RECIPE, defense=NoDefense()))
    assert equal(weights(defended), weights(plain))


def test_the_defense_holds_the_safe_loss_that_plain_fine_tuning_loses(load: Callable[..., Base]) -> None:
    plain, defended = load(), load()
    pad = plain.tokenizer.pad_token_id
    run(plain, replace(RECIPE, defense=NoDefense()))
    trained = run(defended, replace(RECIPE, defense=Spard(tau=4.0, constraint="mean", anchor_weight=0.0)))

    assert evaluate(defended.model, refusals(defended), pad).loss < evaluate(plain.model, refusals(plain), pad).loss
    assert any(step.get("spag/triggered") for step in trained.metrics)


@pytest.mark.parametrize("micro", [1, 4])
def test_micro_batches_change_no_more_than_rounding(load: Callable[..., Base], micro: int) -> None:
    recipe, double = replace(RECIPE, lora=Lora(rank=4)), {"dtype": torch.float64}
    whole, cut = run(load(**double), recipe), run(load(**double), replace(recipe, micro_batch_size=micro))
    assert away(weights(cut).values(), weights(whole).values()) < 1e-6


def test_gradient_checkpointing_changes_no_more_than_rounding(load: Callable[..., Base]) -> None:
    double = {"dtype": torch.float64}
    whole, saving = run(load(**double)), run(load(**double), replace(RECIPE, gradient_checkpointing=True))
    assert away(weights(saving).values(), weights(whole).values()) < 1e-6


def test_metrics_are_flat_and_complete(base: Base) -> None:
    trained = run(base)
    assert len(trained.metrics) == trained.steps == 12
    always = {"loss/task", "accuracy/task", "grad_norm", "lr", "tokens_per_s"}
    assert set(trained.metrics[0]) == always
    assert set(trained.metrics[3]) == always | {
        "loss/safe",
        "loss/safe_prefix",
        "spag/alpha",
        "spag/triggered",
        "spag/capped",
        "spag/skipped",
        "spag/step",
    }
    assert trained.trained_tokens == 3 * sum(len(row.ids) for row in sums(base))


def test_rows_that_are_not_shuffled_are_trained_on_as_they_come(base: Base) -> None:
    recipe = replace(RECIPE, defense=NoDefense(), lora=Lora(rank=4), learning_rate=1e-12)
    rows, pad = sums(base), base.tokenizer.pad_token_id
    parts = [rows[at : at + 6] for at in range(0, len(rows), 6)]
    before = [evaluate(base.model, part, pad).loss for part in parts]

    trained = train(base, rows, [], recipe, resolve(recipe, **TWELVE_STEPS), shuffle=False)

    assert [step["loss/task"] for step in trained.metrics] == pytest.approx(before * 3, rel=1e-4)


def test_the_trained_model_drops_nothing(base: Base) -> None:
    assert not run(base).model.training


def test_unknown_target_modules_are_refused_with_those_there_are(base: Base) -> None:
    with pytest.raises(InvalidRecipe, match=r"no c_attn; it has .*k_proj.*q_proj"):
        run(base, replace(RECIPE, lora=Lora(target_modules=("c_attn",))))


def test_a_broken_model_is_reported_and_not_trained_on(base: Base) -> None:
    with torch.no_grad():
        base.model.model.norm.weight.fill_(math.nan)
    with pytest.raises(NonFiniteLoss):
        run(base)


def test_a_defense_needs_safe_examples(base: Base) -> None:
    with pytest.raises(InvalidData, match="safe examples"):
        train(base, sums(base), [], RECIPE, resolve(RECIPE, **TWELVE_STEPS))


def test_safe_batches_go_through_one_permutation_after_another() -> None:
    drawn = [row for step in range(14) for row in safe_rows(1, step, 7, 3)]
    assert all(count == 1 for start in range(0, 42, 7) for count in Counter(drawn[start : start + 7]).values())
    assert safe_rows(1, 9, 7, 3) == drawn[27:30]


def test_a_safe_batch_is_no_larger_than_the_safe_set() -> None:
    assert sorted(safe_rows(1, 5, 3, 8)) == [0, 1, 2]


@pytest.mark.parametrize(("step", "share"), [(0, 0.5), (1, 1.0), (2, 1.0), (5, 0.625), (9, 0.125)])
def test_the_learning_rate_warms_up_and_falls_linearly(step: int, share: float) -> None:
    assert schedule(step, 10, 0.2) == share
