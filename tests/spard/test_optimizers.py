"""AdamW with its moments in 8 bits: what is kept, what goes on, and where it is refused. Run on a CPU alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spard.config import Lora, NoDefense, Recipe, Spard
from spard.config.earlier_versions import without_added
from spard.config.run_spec import to_mapping
from spard.errors import InvalidRecipe
from spard.models import memory
from spard.models.base import Base
from spard.models.memory import GIB, Gpus, Load, fit
from spard.models.memory import TrainedPart as Shares
from spard.pipeline import run as run_whole
from spard.training import optimizers
from tests.spard.parts import away, stopped_and_resumed
from tests.spard.test_fit import SHAPES
from tests.spard.test_options import RECIPE, equal, run, weights
from tests.spard.test_run import write_run

FULL = replace(RECIPE, lora=None, learning_rate=1e-3)
IN_8_BITS = replace(FULL, optimizer="adamw_8bit")
LARGE = 4096  # numbers of a parameter from which its moments are in 8 bits


@pytest.mark.parametrize("defense", [NoDefense(), Spard(tau=4.0)])
def test_twelve_steps_are_seven_and_five_more_bit_for_bit(
    load: Callable[..., Base], tmp_path: Path, defense: NoDefense | Spard
) -> None:
    recipe = replace(IN_8_BITS, defense=defense)
    whole = run(load(), recipe)
    resumed, seen = stopped_and_resumed(lambda **more: run(load(), recipe, **more), tmp_path)
    assert seen == [*range(1, 13)]
    assert equal(resumed, whole)


def test_a_resume_state_of_the_other_optimizer_is_left_alone(load: Callable[..., Base], tmp_path: Path) -> None:
    steps = list[int]()
    run(load(), replace(FULL, checkpoint_every_s=1e-9), resume_states=tmp_path)
    run(load(), IN_8_BITS, resume_states=tmp_path, on_step=lambda step, total, metrics: steps.append(step))
    assert steps[0] == 1


def test_it_goes_where_adamw_goes_but_for_rounding(load: Callable[..., Base]) -> None:
    begun = [part.detach().clone() for part in load().model.parameters()]
    wide, narrow = weights(run(load(), FULL)), weights(run(load(), IN_8_BITS))
    moved = [after - before for after, before in zip(wide, begun, strict=True)]
    other = [after - before for after, before in zip(narrow, begun, strict=True)]
    assert 0 < away(other, moved) < 0.3


def test_large_parameters_have_a_byte_for_each_moment_and_a_scale_for_256() -> None:
    large, small = (torch.nn.Parameter(torch.randn(n)) for n in (LARGE + 1, LARGE - 1))
    optimizer = optimizers.open_optimizer(IN_8_BITS, [large, small], 1e-3)
    for part in (large, small):
        part.grad = torch.randn_like(part)
    optimizer.step()
    state = optimizers.parameter_state(optimizer, large)
    assert {name: part.dtype for name, part in state.items()} == {
        "state1": torch.uint8,
        "state2": torch.uint8,
        "absmax1": torch.float32,
        "absmax2": torch.float32,
        "step": torch.int64,
    }
    held = sum(part.numel() * part.element_size() for name, part in state.items() if name != "step")
    assert held == memory.moment_bytes(LARGE + 1, "adamw_8bit") == 2 * (LARGE + 1 + 17 * 4)
    assert optimizers.parameter_state(optimizer, small)["state1"].dtype == torch.float32


@pytest.mark.parametrize(
    ("other", "told"),
    [({"lora": Lora()}, "saves memory in full fine-tuning"), ({"sharding": "full"}, "are not cut over GPUs")],
)
def test_it_is_refused_where_it_gains_nothing_or_cannot_be(other: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRecipe, match=told):
        replace(IN_8_BITS, **other)


def test_without_bitsandbytes_a_run_says_what_to_install_before_it_does_anything(
    model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write_run(model_folder(), tmp_path)
    messages = list[dict[str, Any]]()
    found = importlib.util.find_spec
    monkeypatch.setattr(optimizers, "find_spec", lambda name: None if name == "bitsandbytes" else found(name))
    with pytest.raises(InvalidRecipe, match="adamw_8bit needs bitsandbytes: pip install"):
        run_whole(
            replace(spec, recipe=replace(spec.recipe, lora=None, optimizer="adamw_8bit")),
            tmp_path / "out",
            messages.append,
        )
    assert [message["kind"] for message in messages if message["kind"] == "phase"] == []


def test_the_plan_counts_its_bytes_names_it_and_cuts_no_model() -> None:
    shape, load = SHAPES["8B"], Load(rows=16, longest=512)
    wide, narrow = (Shares.from_recipe(replace(IN_8_BITS, optimizer=each)) for each in ("adamw", "adamw_8bit"))
    saved = memory.state_bytes(shape, wide) - memory.state_bytes(shape, narrow)
    assert saved == 8 * shape.parameters - memory.moment_bytes(shape.parameters, "adamw_8bit")
    assert 44 < saved / GIB < 45  # of 8.0 billion parameters
    gpus = Gpus(110 * GIB, 8, shards="if_needed")
    cut, whole = fit(shape, wide, load, gpus), fit(shape, narrow, load, gpus)
    assert (cut.sharding, whole.sharding, whole.fits) == ("full", "none", True)
    assert "moments of AdamW in 8 bits" in whole.sentence
    assert whole.to_json()["optimizer"] == "adamw_8bit"


def test_of_an_adapter_it_would_save_next_to_nothing() -> None:
    """For which reason it is refused: rank 16 on the attention of 8 billion parameters."""
    trained = Shares.from_recipe(Recipe(lora=Lora(rank=16)))
    count = trained.parameters(SHAPES["8B"])
    saved = memory.moment_bytes(count, "adamw") - memory.moment_bytes(count, "adamw_8bit")
    assert 70e6 < saved < 90e6
    assert saved < memory.weight_bytes(SHAPES["8B"], trained) / 100


def test_recipes_from_before_say_nothing_of_it() -> None:
    assert "optimizer" not in without_added(to_mapping(FULL))
    assert without_added(to_mapping(IN_8_BITS))["optimizer"] == "adamw_8bit"
