from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spard.config import Hyperparameters, Lora, NoDefense, Recipe, SafeLora, resolve
from spard.errors import InvalidRecipe
from spard.methods import safelora
from spard.methods.safelora import agreement, project_update, to_project
from spard.models.base import Base, load_base
from spard.training.train import train
from tests.spard.parts import sums, write_model

RECIPE = Recipe(
    lora=Lora(rank=4), hyperparameters=Hyperparameters(n_epochs=1, batch_size=6), learning_rate=5e-3, seed=5
)


@pytest.fixture
def unaligned_model(load: Callable[..., Base], tmp_path: Path) -> str:
    """A model from which the usual one differs in rank-one updates of every matrix."""
    base, generator = load(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for part in base.model.parameters():
            if part.ndim == 2:
                rows, columns = part.shape
                part.add_(torch.randn(rows, 1, generator=generator) @ torch.randn(1, columns, generator=generator))
    base.model.save_pretrained(tmp_path / "unaligned")
    base.tokenizer.save_pretrained(tmp_path / "unaligned")
    return str(tmp_path / "unaligned")


def weights(base: Base, defense: SafeLora | NoDefense, lora: Lora | None) -> dict[str, torch.Tensor]:
    recipe = replace(RECIPE, defense=defense, lora=lora)
    train(base, sums(base), [], recipe, resolve(recipe, rows=24, hidden_size=32))
    return {name: part.detach() for name, part in base.model.named_parameters() if part.requires_grad}


def test_the_projection_is_its_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    V, D = torch.randn(5, 7, generator=generator), torch.randn(5, 3, generator=generator)
    C = V @ V.T / V.norm()
    torch.testing.assert_close(project_update(D, V), C @ D)


def test_the_cosine_is_that_of_the_flattened_updates() -> None:
    generator = torch.Generator().manual_seed(0)
    V, D = torch.randn(5, 7, generator=generator), torch.randn(5, 7, generator=generator)
    expected = torch.nn.functional.cosine_similarity((V @ V.T @ D).flatten(), D.flatten(), dim=0)
    assert agreement(D, V) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("cfg", "names"),
    [
        (SafeLora(layers=1), ["b"]),
        (SafeLora(layers=2), ["b", "c", "d"]),  # a tie
        (SafeLora(layers=99), ["a", "b", "c", "d"]),
        (SafeLora(layers=None, threshold=0.1), ["b"]),
        (SafeLora(layers=None, threshold=-0.5), []),
    ],
)
def test_the_weights_that_agree_least_are_projected(cfg: SafeLora, names: list[str]) -> None:
    assert to_project({"a": 0.9, "b": 0.1, "c": 0.4, "d": 0.4}, cfg) == names


@pytest.mark.parametrize("lora", [Lora(rank=4), None])
def test_updates_are_looked_at_one_at_a_time(
    load: Callable[..., Base], unaligned_model: str, lora: Lora | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def alone(update: torch.Tensor, V: torch.Tensor) -> float:
        assert not [each for each in seen if each() is not None], "updates as large as the model are on its device"
        seen.append(weakref.ref(update))
        return agreement(update, V)

    monkeypatch.setattr(safelora, "agreement", alone)
    weights(load(), SafeLora(base_unaligned=unaligned_model), lora)
    assert len(seen) == (8 if lora else 14)


def test_an_update_of_zeros_agrees() -> None:
    assert agreement(torch.zeros(3, 3), torch.ones(3, 3)) == 1.0


@pytest.mark.parametrize("lora", [RECIPE.lora, None])
def test_projected_updates_lie_in_what_alignment_changed(
    load: Callable[..., Base], unaligned_model: str, lora: Lora | None
) -> None:
    plain = weights(load(), NoDefense(), lora)
    found = weights(load(), SafeLora(base_unaligned=unaligned_model, layers=None, threshold=1.0), lora)
    start = dict(load().model.named_parameters())
    other = {name: part.detach() for name, part in load_base(unaligned_model).model.named_parameters()}
    for name, part in found.items():
        if "lora_B" in name:
            base_name = name.replace(".lora_B.default", "")
            V = start[base_name].detach() - other[base_name]
            torch.testing.assert_close(part, project_update(plain[name], V))
        elif "lora_A" in name or part.ndim == 1 or "embed" in name or "lm_head" in name:
            assert torch.equal(part, plain[name])
        else:
            V = start[name].detach() - other[name]
            update = plain[name] - start[name].detach()
            torch.testing.assert_close(part, start[name].detach() + project_update(update, V))


def test_a_threshold_that_nothing_meets_leaves_plain_fine_tuning(
    load: Callable[..., Base], unaligned_model: str
) -> None:
    plain = weights(load(), NoDefense(), RECIPE.lora)
    found = weights(load(), SafeLora(base_unaligned=unaligned_model, layers=None, threshold=-1.0), RECIPE.lora)
    assert all(torch.equal(part, plain[name]) for name, part in found.items())


@pytest.mark.parametrize("source", [None, "/nowhere/at/all"])
def test_without_the_unaligned_model_the_setting_is_named_before_training(base: Base, source: str | None) -> None:
    with pytest.raises(InvalidRecipe, match="base_unaligned") as caught:
        weights(base, SafeLora(base_unaligned=source), RECIPE.lora)
    assert caught.value.param == "recipe.defense.base_unaligned"


def test_an_unaligned_model_of_another_shape_is_refused(base: Base, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", hidden_size=16)
    with pytest.raises(InvalidRecipe, match=r"no weight model\.layers\.0\.self_attn\.q_proj of shape \[32, 32\]"):
        weights(base, SafeLora(base_unaligned=str(other)), RECIPE.lora)
