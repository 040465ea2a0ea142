"""The plan of a training's memory: its formulae against what PyTorch saves, and what it chooses."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from spard.config import Defense, Hyperparameters, Lisa, Lora, Recipe, SafeGrad, Spard, resolve
from spard.models import memory
from spard.models.base import Base
from spard.models.lora import inspect_layout, trainable_model
from spard.models.memory import GIB, Gpus, Load, TrainedPart, compute_need, fit
from spard.models.shapes import read_layout, read_model_shape, read_shape
from spard.training.resume_state import load, newest_first
from spard.training.run import METHOD
from spard.training.train import train
from tests.architectures import write_architecture
from tests.narrowing import require
from tests.spard.fake_tensors import saved_bytes
from tests.spard.parts import refusals, sums

LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
)
LLAMA_70B = LlamaConfig(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=128256,
)
QWEN_32B = Qwen2Config(
    hidden_size=5120,
    intermediate_size=27648,
    num_hidden_layers=64,
    num_attention_heads=40,
    num_key_value_heads=8,
    vocab_size=152064,
)
QWEN3_32B = Qwen3Config(
    hidden_size=5120,
    intermediate_size=25600,
    num_hidden_layers=64,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
)
MODELS = {"8B": LLAMA_8B, "70B": LLAMA_70B, "32B": QWEN_32B, "Qwen 3 32B": QWEN3_32B}
SHAPES = {
    name: require(read_model_shape(config.to_dict())) for name, config in MODELS.items()
}  # measuring changes a config
LENGTHS = (512, 2048, 8192)
EVERYWHERE = Lora(target_modules=("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"))
GPUS = [Gpus(size * GIB, count, shards="if_needed") for size in (24, 40, 80, 141) for count in (1, 2, 8)]
CASES: list[tuple[str, Recipe, int]] = [
    ("Qwen 3 32B", Recipe(lora=EVERYWHERE), 512),
    ("8B", Recipe(lora=None), 512),
    *(
        (name, Recipe(gradient_checkpointing=is_on), tokens)
        for name, is_on, tokens in product(MODELS, (False, True), LENGTHS)
    ),
]


@pytest.mark.parametrize(("name", "recipe", "tokens"), CASES)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_what_is_planned_is_what_pytorch_saves(name: str, recipe: Recipe, tokens: int) -> None:
    shape, rows = SHAPES[name], 2
    measured = saved_bytes(MODELS[name], recipe, rows, tokens, shape.layers)
    is_on = recipe.gradient_checkpointing
    planned = memory.activation_bytes(shape, TrainedPart(recipe.lora), rows * tokens, checkpointing=is_on)
    assert 0.98 <= planned / measured <= 1.02


OTHERS: dict[str, PretrainedConfig] = {
    "Phi-3": Phi3Config(hidden_size=3072, intermediate_size=8192, num_attention_heads=32),
    "Pythia": GPTNeoXConfig(hidden_size=2048, intermediate_size=8192, num_attention_heads=16),
    "Falcon": FalconConfig(),
    "Mixtral": MixtralConfig(),
    "OLMoE": OlmoeConfig(),
}


@pytest.mark.parametrize(("name", "checkpointing"), [*product(OTHERS, (False, True))])
def test_of_other_kinds_no_less_is_planned_than_pytorch_saves(name: str, checkpointing: bool) -> None:
    config, recipe = OTHERS[name], Recipe(gradient_checkpointing=checkpointing)
    config.num_hidden_layers = 4
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = require(read_model_shape(config.to_dict(), inspect_layout(model)))
    assert shape.parameters == sum(part.numel() for part in model.parameters())
    planned = memory.activation_bytes(shape, TrainedPart(recipe.lora), 2 * 512, checkpointing=checkpointing)
    measured = saved_bytes(config, recipe, 2, 512, shape.layers)
    assert 1 <= round(planned / measured, 2) <= (1.25 if checkpointing else 3)
    trained = trainable_model(model, recipe)
    adapter = sum(part.numel() for part in trained.parameters() if part.requires_grad)
    assert TrainedPart(recipe.lora).parameters(shape) == adapter


def test_a_model_of_another_kind_is_planned_from_its_files(tmp_path: Path) -> None:
    write_architecture("Qwen3 MoE", tmp_path)
    shape = require(read_shape(str(tmp_path)))
    layout = require(read_layout(tmp_path))
    assert (shape.parameters, shape.experts) == (layout.parameters, 2 * (2 * 24 + 32))
    assert compute_need(shape, TrainedPart(Lora()), 64).alone > compute_need(shape, TrainedPart(Lora(rank=1)), 64).alone
    held = memory.weight_bytes(shape, TrainedPart(Lora(), quantization="nf4"))
    assert held > layout.parameters, "experts stay as they are: they are no linear layers"


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_that_fits_stays_below_the_gpu_s_memory(name: str) -> None:
    for gpus, longest, rows, full in product(GPUS, LENGTHS, (1, 16, 256), (False, True)):
        trained = TrainedPart(None if full else Lora())
        plan = fit(SHAPES[name], trained, Load(rows, longest, safe_tokens=16 * 200), gpus)
        saved = plan.weights_bytes + plan.saved_bytes
        assert not plan.fits or saved < plan.peak_bytes <= gpus.memory_bytes
        assert plan.fits or plan.peak_bytes > gpus.usable - GIB * 2


def test_the_default_job_on_8_billion_parameters_fits_one_gpu_of_80_gib() -> None:
    plan = fit(SHAPES["8B"], TrainedPart(Lora()), Load(16, 2048), Gpus(80 * GIB))
    assert (plan.fits, plan.gradient_checkpointing, plan.sharding) == (True, False, "none")
    assert 1 <= require(plan.micro_batch_size) < 16
    assert require(plan.pass_tokens) >= 2048


def test_a_batch_that_fits_is_left_as_it_was_asked_for() -> None:
    plan = fit(SHAPES["8B"], TrainedPart(Lora()), Load(4, 512), Gpus(80 * GIB))
    assert (plan.micro_batch_size, plan.pass_tokens, plan.gradient_checkpointing) == (None, None, False)
    assert fit(
        SHAPES["8B"], TrainedPart(Lora()), Load(4, 512, checkpointing=True), Gpus(80 * GIB)
    ).gradient_checkpointing


def test_a_small_gpu_checkpoints_rather_than_run_nearly_empty() -> None:
    plan = fit(SHAPES["8B"], TrainedPart(Lora()), Load(16, 2048), Gpus(24 * GIB))
    assert (plan.fits, plan.gradient_checkpointing) == (True, True)


def test_a_model_of_70_billion_needs_several_gpus() -> None:
    trained, load, one = TrainedPart(Lora()), Load(16, 2048), Gpus(80 * GIB)
    eight = replace(one, count=8)
    assert not fit(SHAPES["70B"], trained, load, one).fits
    assert not fit(SHAPES["70B"], trained, load, eight).fits  # each would hold it whole
    plan = fit(SHAPES["70B"], trained, load, replace(eight, shards="if_needed"))
    assert (plan.fits, plan.sharding, plan.ranks) == (True, "full", 8)
    assert fit(SHAPES["8B"], trained, load, replace(eight, shards="always")).sharding == "full", (
        "small, cut all the same"
    )
    far = fit(SHAPES["70B"], trained, load, Gpus(80 * GIB, 16, machines=2, shards="if_needed"))
    assert (far.fits, far.sharding, far.ranks) == (True, "hybrid", 16)


def test_what_the_gpus_of_one_machine_do_not_hold_is_cut_over_those_of_all() -> None:
    trained, load, one = TrainedPart(Lora()), Load(16, 2048), Gpus(24 * GIB, 8, shards="if_needed")
    assert not fit(SHAPES["70B"], trained, load, one).fits
    plans = [fit(SHAPES["70B"], trained, load, replace(one, count=8 * n, machines=n)) for n in (2, 4)]
    assert [(plan.fits, plan.sharding, plan.ranks) for plan in plans] == [(True, "full", 16), (True, "full", 32)]
    assert plans[1].weights_bytes == plans[0].weights_bytes // 2
    asked = fit(SHAPES["70B"], trained, load, replace(one, count=16, machines=2, shards="always"))
    assert (asked.fits, asked.sharding) == (False, "hybrid"), "a copy on each machine was asked for"


def test_more_gpus_than_rows_are_not_asked_for() -> None:
    assert fit(SHAPES["8B"], TrainedPart(Lora()), Load(2, 512), Gpus(80 * GIB, 8)).ranks == 2


def test_the_least_that_a_job_needs_is_what_a_plan_finds_enough() -> None:
    for name, longest in product(MODELS, LENGTHS):
        least = compute_need(SHAPES[name], TrainedPart(Lora()), longest)
        enough, little = (Gpus(int(least.alone * part)) for part in (1.001, 0.99))
        for safe_tokens in (0, 8192, 64 * longest):
            assert fit(SHAPES[name], TrainedPart(Lora()), Load(16, longest, safe_tokens), enough).fits
        assert not fit(SHAPES[name], TrainedPart(Lora()), Load(16, longest), little).fits


def test_a_gpu_with_exactly_what_is_needed_is_enough_for_safe_batches_and_pairs() -> None:
    for name, longest, answers in product(MODELS, LENGTHS, (1, 2)):
        least = compute_need(SHAPES[name], TrainedPart(Lora()), longest, answers)
        plan = fit(SHAPES[name], TrainedPart(Lora()), Load(16, longest, 8192, answers), Gpus(least.alone))
        assert (plan.fits, plan.micro_batch_size, plan.pass_tokens) == (True, 1, longest * answers)
        assert not fit(
            SHAPES[name], TrainedPart(Lora()), Load(16, longest, 8192, answers), Gpus(least.alone - GIB)
        ).fits


def test_the_model_before_training_is_counted_where_all_weights_are_trained() -> None:
    shape, load, kinds = SHAPES["8B"], Load(16, 2048), (Spard(), SafeGrad())
    plain, twin = (TrainedPart.from_recipe(Recipe(lora=None, defense=each)) for each in kinds)
    least, more = (compute_need(shape, each, 2048) for each in (plain, twin))
    for count in (1, 8):
        share = 2 * memory.weight_bytes(shape, plain) / count  # the model, and the task's gradient beside the safe one
        assert more.bytes_per_gpu(count) - least.bytes_per_gpu(count) == pytest.approx(share / 0.94, rel=1e-6)
    assert fit(shape, twin, load, Gpus(more.alone)).fits
    assert not fit(shape, twin, load, Gpus(least.alone)).fits
    assert not TrainedPart.from_recipe(Recipe(defense=SafeGrad())).has_twin


@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_least_that_a_job_needs_on_several_gpus_is_enough_for_a_plan(count: int) -> None:
    for name, longest in product(MODELS, LENGTHS):
        least = compute_need(SHAPES[name], TrainedPart(Lora()), longest).bytes_per_gpu(count)
        enough, little = (
            Gpus(int(least * part), count, shards="always") for part in (1.001, 0.99 if count == 2 else 0.8)
        )
        assert fit(SHAPES[name], TrainedPart(Lora()), Load(16, longest), enough).fits
        assert not fit(SHAPES[name], TrainedPart(Lora()), Load(16, longest), little).fits


def test_preference_pairs_and_long_safe_batches_take_more() -> None:
    shape, trained, gpu = SHAPES["8B"], TrainedPart(Lora()), Gpus(80 * GIB)
    answers = require(fit(shape, trained, Load(16, 2048), gpu).micro_batch_size)
    pairs = require(fit(shape, trained, Load(16, 2048, answers=2), gpu).micro_batch_size)
    assert pairs == answers // 2
    longer = fit(shape, trained, Load(1, 2048, safe_tokens=60_000), gpu)
    assert require(longer.pass_tokens) < 60_000
    assert longer.peak_bytes <= gpu.memory_bytes
    assert fit(shape, trained, Load(1, 2048), gpu).pass_tokens is None


def test_parameters_are_counted_as_the_models_have_them() -> None:
    found = {name: round(shape.parameters / 1e9, 2) for name, shape in SHAPES.items()}
    assert found == {"8B": 8.03, "70B": 70.55, "32B": 32.76, "Qwen 3 32B": 32.76}


@pytest.mark.parametrize(
    "change", [{"num_experts": 8}, {"hidden_size": None}, {"num_hidden_layers": "two"}, {"text_config": {"x": 1}}]
)
def test_of_an_unknown_kind_of_model_nothing_is_said(change: dict[str, Any]) -> None:
    assert read_model_shape(LLAMA_8B.to_dict() | change) is None


def test_a_shape_is_read_from_a_model_s_folder(tmp_path: Path) -> None:
    assert read_shape(str(tmp_path)) is None
    (tmp_path / "config.json").write_text("[]")
    assert read_shape(str(tmp_path)) is None
    LLAMA_70B.save_pretrained(tmp_path)
    assert require(read_shape(str(tmp_path))).hidden == 8192


@pytest.mark.parametrize(
    "defense", [Spard(check_every=1), Spard(variant="gated", tau=0.0), SafeGrad(), Lisa(task_steps=1)]
)
def test_the_plan_knows_the_vectors_that_a_defense_keeps(base: Base, defense: Defense, tmp_path: Path) -> None:
    recipe = Recipe(defense=defense, lora=None, hyperparameters=Hyperparameters(1, batch_size=12))
    task = sums(base)
    train(base, task, refusals(base), recipe, resolve(recipe, len(task), base.hidden_size), resume_states=tmp_path)
    kept, _ = load(next(newest_first(tmp_path)))
    own = sum(part.numel() for name, part in kept.items() if name.startswith(METHOD))
    assert round(own / base.model.num_parameters(), 1) == defense.kept_vectors
    assert TrainedPart.from_recipe(recipe).copies == 1 + defense.kept_vectors + isinstance(defense, SafeGrad)
