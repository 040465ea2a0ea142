"""The operations that a training is said to have taken are those that PyTorch's own counter finds."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, MixtralConfig

from spard.config import Lora, Recipe, resolve
from spard.config.defenses.none import NoDefense
from spard.config.defenses.spard import Spard
from spard.data.batches import collate
from spard.digests import file_sha256
from spard.losses.cross_entropy import token_losses
from spard.losses.gradients import gradient
from spard.models.base import Base, disable_adapters
from spard.models.lora import trainable_model
from spard.training.compute import OperationCounter, PassCost
from spard.training.train import train
from tests.spard.parts import CONFIGS, SIZES, refusals, stopped_and_resumed, sums, write_model

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NEW = ("operations", "forward_tokens", "backward_tokens", "energy_j")  # in a resume state
DEEP = {"num_hidden_layers": 8}  # of two layers the first, whose inputs need no gradient, is half of the model


def eager(folder: Path) -> Any:
    """Attention as two products: of the fused one PyTorch's counter knows the kernels of GPUs alone."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def counted_both_ways(base: Base, recipe: Recipe) -> tuple[int, int]:
    """One forward and backward pass over four rows: what the hooks count, and what PyTorch's counter does."""
    model = trainable_model(base.model, recipe)
    theta = [part for part in model.parameters() if part.requires_grad]
    batch = collate(sums(base, 4), base.tokenizer.pad_token_id, base.device)
    counter = OperationCounter(base.model, checkpointing=recipe.gradient_checkpointing)
    with FlopCounterMode(display=False) as reference, counter.counting():
        gradient(token_losses(base.model, batch).loss_S.sum(), theta)
    counter.close()
    return counter.operations, reference.get_total_flops()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [None, Lora(rank=4), Lora(rank=4, target_modules=ALL_LINEAR)])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "smollm"])
def test_a_pass_costs_what_pytorch_counts(
    base: Base, tmp_path: Path, architecture: str, lora: Lora | None, checkpointing: bool
) -> None:
    deep = replace(base, model=eager(write_model(tmp_path / "model", architecture, **DEEP)))
    recipe = Recipe(defense=NoDefense(), lora=lora, gradient_checkpointing=checkpointing)
    found, expected = counted_both_ways(deep, recipe)
    assert expected * 0.99 < found < expected * (1.07 if checkpointing else 1.04)


def test_a_copy_of_the_model_is_counted_too(base: Base) -> None:
    counter = OperationCounter(base.model, checkpointing=False)
    batch = collate(sums(base, 2), base.tokenizer.pad_token_id, base.device)
    twin = copy.deepcopy(base.model)
    with counter.counting():
        token_losses(twin, batch)
    assert counter.forward_tokens == batch.ids_BT.numel()


def test_a_mixture_counts_the_experts_that_a_token_meets(base: Base, tmp_path: Path) -> None:
    config = MixtralConfig(**(SIZES | DEEP), num_local_experts=4, num_experts_per_tok=2)
    dense = CONFIGS["llama"](**(SIZES | DEEP))
    with torch.random.fork_rng():
        mixture, plain = AutoModelForCausalLM.from_config(config), AutoModelForCausalLM.from_config(dense)
    mlp = 3 * SIZES["hidden_size"] * SIZES["intermediate_size"]
    found, expected = PassCost.from_model(mixture).weights, PassCost.from_model(plain).weights
    assert found - expected == pytest.approx(DEEP["num_hidden_layers"] * mlp, rel=0.05)  # two of four; and the routers


def test_what_is_not_being_counted_is_not(base: Base) -> None:
    trainable_model(base.model, Recipe(defense=NoDefense(), lora=Lora(rank=4)))
    batch = collate(sums(base, 2), base.tokenizer.pad_token_id, base.device)
    counter = OperationCounter(base.model, checkpointing=False)
    token_losses(base.model, batch)
    assert counter.operations == 0
    with counter.counting():
        token_losses(base.model, batch)
    with_adapter = counter.operations
    with counter.counting(), disable_adapters(base.model), torch.no_grad():
        token_losses(base.model, batch)
    assert 0 < counter.operations - with_adapter < with_adapter
    assert (counter.forward_tokens, counter.backward_tokens) == (2 * batch.ids_BT.numel(), 0)


def trained_compute(base: Base, **options: Any) -> Any:
    recipe = Recipe(defense=Spard(), lora=Lora(rank=4), checkpoint_every_s=1e9)
    rows = sums(base)
    return train(base, rows, refusals(base), recipe, resolve(recipe, len(rows), base.hidden_size), **options)


def test_a_training_counts_its_steps_and_leaves_no_hook(load: Callable[..., Base], tmp_path: Path) -> None:
    base = load()
    whole = trained_compute(base).compute
    assert not base.model.get_decoder()._forward_hooks
    assert whole.operations > 0
    assert whole.forward_tokens > whole.backward_tokens > 0
    resumed, _ = stopped_and_resumed(lambda **options: trained_compute(load(), **options), tmp_path)
    assert resumed.compute is not None
    assert resumed.compute.operations == whole.operations


def test_a_run_that_goes_on_from_an_older_version_has_no_count(load: Callable[..., Base], tmp_path: Path) -> None:
    """Half of the operations would be worse than none."""

    def forget(**options: Any) -> Any:
        for path in tmp_path.glob("step-*"):
            state = {
                key: value for key, value in json.loads((path / "state.json").read_text()).items() if key not in NEW
            }
            (path / "state.json").write_text(json.dumps(state))
            digests = json.loads((path / "manifest.json").read_text())
            (path / "manifest.json").write_text(json.dumps(digests | {"state.json": file_sha256(path / "state.json")}))
        return trained_compute(load(), **options)

    resumed, steps = stopped_and_resumed(forget, tmp_path)
    assert steps == sorted(set(steps))  # it did go on
    assert resumed.compute is not None
    assert resumed.compute.operations is None
