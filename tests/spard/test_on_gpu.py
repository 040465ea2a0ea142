"""What a GPU computes beside what a CPU does: training, replies, embeddings, models in 4 bits: `make gpu`.

Skipped without a GPU, and where CUDA_VISIBLE_DEVICES does not name one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spard.config import NoDefense, Quantization, Spard, resolve
from spard.losses.cross_entropy import evaluate
from spard.models.base import Base, load_base
from spard.models.generate import generate
from spard.pipeline import run as run_whole
from spard.selection.dpp import select
from spard.selection.embeddings import embed
from spard.training.train import train
from tests.spard.parts import away, refusals, sums, write_model
from tests.spard.ranks import METHODS, PROJECTED, case_name, write_models
from tests.spard.test_optimizers import FULL, IN_8_BITS
from tests.spard.test_run import write_run
from tests.spard.test_train import RECIPE, TWELVE_STEPS, equal, metrics_without_speed, run, weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NEAR = 1e-4  # models take the mean of squares, and attention its angles, in single precision, whatever the weights are
PROMPTS = [f"Do the thing {i}{'!' * (i % 11)}" for i in range(40)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the random models that the cases of `tests.spard.ranks` train on, and one that NF4 can hold."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    write_model(folder / "wide", hidden_size=64, intermediate_size=128, head_dim=16)
    return folder


@pytest.fixture(scope="module")
def case_results(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return the weights and metrics of each case, trained on a CPU, a GPU, or the one GPU of an NCCL group."""
    out = tmp_path_factory.mktemp("left")
    # What is computed in fewer bits rounds otherwise on a GPU.
    doubles = [method for method, case in METHODS.items() if case.dtype is torch.float64]
    names = [case_name(method, lora=True) for method in doubles] + [case_name("default", lora=False)]
    for place in ("cpu", "cuda", "nccl"):
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if place == "cpu" else {}
        command = [sys.executable, "-m", "tests.spard.trained_cases", str(models), str(out / place), place, *names]
        subprocess.run(command, check=True, env=os.environ | hidden, timeout=600)
    return lambda place: torch.load(out / place, weights_only=True)


@pytest.mark.parametrize("place", ["cuda", "nccl"])
def test_a_gpu_trains_what_a_cpu_trains(case_results: Callable[[str], Any], place: str) -> None:
    expected, found = case_results("cpu"), case_results(place)
    assert expected.keys() == found.keys()
    for name, (parts, metrics) in expected.items():
        assert found[name][0].keys() == parts.keys(), name
        assert away(found[name][0].values(), parts.values()) < NEAR, name
        for each in ("spag/triggered", "spag/capped"):
            assert [step.get(each) for step in found[name][1]] == [step.get(each) for step in metrics], name
        if name.partition(".")[0] in PROJECTED:
            assert any(step.get("spag/triggered") for step in metrics), f"vacuous: nothing was projected in {name}"


def test_a_run_is_repeated_bit_for_bit_and_resumed(models: Path, tmp_path: Path) -> None:
    steps = list[int]()
    recipe = replace(RECIPE, checkpoint_every_s=1e-9)
    whole = run(_load(models / "tiny"), recipe)
    again = run(_load(models / "tiny"), recipe, resume_states=tmp_path, on_step=lambda step, *_: steps.append(step))
    assert equal(weights(whole), weights(again))
    assert metrics_without_speed(whole) == metrics_without_speed(again)
    resumed = run(_load(models / "tiny"), recipe, resume_states=tmp_path, on_step=lambda step, *_: steps.append(step))
    assert equal(weights(whole), weights(resumed))


def test_replies_in_batches_are_those_of_a_cpu(models: Path) -> None:
    there, here = (load_base(models / "tiny", device=device, dtype=torch.float64) for device in ("cuda", "cpu"))
    expected = generate(here.model, here.tokenizer, PROMPTS, 48)
    assert len(set(expected)) > 10
    assert generate(there.model, there.tokenizer, PROMPTS, 48) == expected


def test_attention_makes_no_plan_for_each_shape(models: Path) -> None:
    _load(models / "tiny")
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_embeddings_and_the_rows_that_are_selected_are_those_of_a_cpu(models: Path) -> None:
    found = list[list[int]]()
    embeddings = list[torch.Tensor]()
    for device in ("cpu", "cuda"):
        base = load_base(models / "tiny", device=device, dtype=torch.float64)
        embeddings.append(embed(base, PROMPTS).cpu())
        found.append(select(embed(base, PROMPTS), embed(base, PROMPTS[:7]), 12))
    assert away([embeddings[1]], [embeddings[0]]) < 1e-4  # embeddings are kept in single precision
    assert found[0] == found[1]


@pytest.mark.parametrize("quantization", ["nf4", "nf4_double"])
def test_a_model_in_nf4_has_one_digest_learns_and_keeps_its_weights(models: Path, quantization: Quantization) -> None:
    pytest.importorskip("bitsandbytes")
    one, two = (_load(models / "wide", quantization) for _ in range(2))
    pairs = zip(one.model.state_dict().values(), two.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    frozen = {name: part.clone() for name, part in one.model.state_dict().items()}
    before = evaluate(one.model, sums(one), one.tokenizer.pad_token_id).loss
    recipe = replace(RECIPE, quantization=quantization)
    trained = train(one, sums(one), refusals(one), recipe, resolve(recipe, **TWELVE_STEPS))
    assert equal(weights(trained), weights(run(two, recipe)))
    after = {name.replace(".base_layer", ""): part for name, part in one.model.state_dict().items()}
    assert all(torch.equal(after[name], part) for name, part in frozen.items())
    assert evaluate(one.model, sums(one), one.tokenizer.pad_token_id).loss < before - 0.1


def test_a_layer_in_nf4_multiplies_by_what_its_weights_are(models: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.functional import dequantize_4bit

    layer = _load(models / "wide", "nf4").model.get_submodule("model.layers.0.self_attn.q_proj")
    rounded = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    x = torch.randn(5, rounded.shape[1], device="cuda", dtype=rounded.dtype)
    with torch.inference_mode():
        assert away([layer(x)], [x @ rounded.T]) < 0.02


@pytest.mark.parametrize("defense", [NoDefense(), Spard(tau=4.0)])
def test_moments_in_8_bits_go_where_adamw_goes_but_for_rounding(models: Path, defense: NoDefense | Spard) -> None:
    pytest.importorskip("bitsandbytes")
    begun = [part.detach().clone() for part in _load(models / "tiny").model.parameters()]
    wide, narrow, again = (
        weights(run(_load(models / "tiny"), replace(each, defense=defense))) for each in (FULL, IN_8_BITS, IN_8_BITS)
    )
    moved = [after - before for after, before in zip(wide.values(), begun, strict=True)]
    other = [after - before for after, before in zip(narrow.values(), begun, strict=True)]
    assert 0 < away(other, moved) < 0.3
    assert equal(narrow, again)


def test_a_whole_run_proves_its_adapter_in_another_process(models: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    spec = write_run(models / "wide", tmp_path)
    for quantization in ("none", "nf4_double"):
        out = tmp_path / quantization
        run_whole(replace(spec, recipe=replace(spec.recipe, quantization=quantization)), out, lambda message: None)
        assert json.loads((out / "adapter/manifest.json").read_text())["proof"]["max_difference"] < 0.005


def _load(folder: Path, quantization: Quantization = "none") -> Base:
    return load_base(folder, device="cuda", dtype=torch.float32, quantization=quantization)
