"""Runs that go on from an adapter."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spard.config import Hyperparameters, Lora, NoDefense, Recipe, Spard, resolve
from spard.errors import AdapterMismatch, Stopped
from spard.models.adapters import save_adapter
from spard.models.base import Base
from spard.training.train import TrainedModel, train
from tests.spard.parts import refusals, sums

RECIPE = Recipe(
    defense=Spard(safe_batch_size=3),
    lora=Lora(rank=4),
    hyperparameters=Hyperparameters(n_epochs=2, batch_size=6),
    learning_rate=5e-3,
    seed=5,
)
STILL = replace(RECIPE, defense=NoDefense(), learning_rate=1e-9, weight_decay=0.0)


def run(base: Base, recipe: Recipe = RECIPE, **more: Any) -> TrainedModel:
    resolved = resolve(recipe, rows=24, hidden_size=32)
    return train(base, sums(base), refusals(base), recipe, resolved, **more)


def weights(trained: TrainedModel) -> dict[str, torch.Tensor]:
    return {name: part.detach().clone() for name, part in trained.model.named_parameters() if part.requires_grad}


@pytest.fixture
def adapter(load: Callable[..., Base], tmp_path: Path) -> Path:
    base = load()
    save_adapter(run(base).model, base, "tiny", tmp_path / "first", {"base_digest": base.digest})
    return tmp_path / "first"


def test_the_weights_of_the_adapter_are_the_first(load: Callable[..., Base], adapter: Path) -> None:
    first, second = run(load()), run(load(), STILL, start_from=adapter)

    for name, part in weights(first).items():
        torch.testing.assert_close(weights(second)[name], part, atol=1e-6, rtol=0)


def test_tau_and_anchor_stay_those_of_the_base_model(load: Callable[..., Base], adapter: Path) -> None:
    fresh, further = run(load()), run(load(), start_from=adapter)

    assert further.tau == fresh.tau
    assert further.metrics[0]["loss/task"] < fresh.metrics[0]["loss/task"]


def test_a_run_on_top_of_another_resumes_bit_for_bit(load: Callable[..., Base], adapter: Path, tmp_path: Path) -> None:
    whole = run(load(), start_from=adapter)
    steps: list[int] = []
    stop: dict[str, Any] = {
        "on_step": lambda step, total, metrics: steps.append(step),
        "should_stop": lambda: len(steps) == 3,
    }
    with pytest.raises(Stopped):
        run(load(), start_from=adapter, resume_states=tmp_path / "checkpoints", **stop)

    resumed = run(load(), start_from=adapter, resume_states=tmp_path / "checkpoints")

    assert all(torch.equal(part, weights(resumed)[name]) for name, part in weights(whole).items())


def test_a_checkpoint_of_a_run_from_the_base_model_is_not_taken(
    load: Callable[..., Base], adapter: Path, tmp_path: Path
) -> None:
    with pytest.raises(Stopped):
        run(load(), resume_states=tmp_path / "checkpoints", should_stop=lambda: True)

    seen: list[int] = []
    run(load(), start_from=adapter, resume_states=tmp_path / "checkpoints", on_step=lambda step, *_: seen.append(step))

    assert seen[0] == 1


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (replace(RECIPE, lora=Lora(rank=8)), "the adapter has r 4, the recipe 8"),
        (replace(RECIPE, lora=Lora(rank=4, alpha=1.0)), "lora_alpha"),
        (replace(RECIPE, lora=Lora(rank=4, target_modules=("q_proj",))), "target_modules"),
        (replace(RECIPE, lora=None), "full fine-tuning cannot"),
    ],
)
def test_an_adapter_of_another_shape_is_refused(
    load: Callable[..., Base], adapter: Path, recipe: Recipe, words: str
) -> None:
    with pytest.raises(AdapterMismatch, match=words):
        run(load(), recipe, start_from=adapter)


def test_an_adapter_of_another_base_model_is_refused(load: Callable[..., Base], adapter: Path) -> None:
    manifest = adapter / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"base_digest": "sha256:other"}))
    with pytest.raises(AdapterMismatch, match="another base model"):
        run(load(), start_from=adapter)


@pytest.mark.parametrize("change", [{"use_rslora": True}, {"alpha_pattern": {"q_proj": 2}}, {"r": None}])
def test_an_adapter_of_another_kind_is_refused(
    load: Callable[..., Base], adapter: Path, change: dict[str, object]
) -> None:
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(AdapterMismatch, match=next(iter(change))):
        run(load(), start_from=adapter)


def test_a_folder_without_an_adapter_is_refused(load: Callable[..., Base], tmp_path: Path) -> None:
    with pytest.raises(AdapterMismatch, match="no LoRA adapter can be read there"):
        run(load(), start_from=tmp_path)
