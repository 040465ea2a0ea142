"""A base model in NF4: trained on as any other, and everywhere another model than the one in its files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from spard.config import Lora, NoDefense, Quantization, Recipe, SafeLora, defenses, resolve
from spard.config.earlier_versions import without_added
from spard.config.run_spec import to_mapping
from spard.errors import AdapterMismatch, InvalidModel, InvalidRecipe
from spard.losses.cross_entropy import evaluate
from spard.models import memory
from spard.models.adapters import save_merged
from spard.models.base import Base, load_base, quantized_bytes
from spard.models.memory import GIB, Gpus, Load, TrainedPart, compute_need, fit
from spard.models.shapes import read_model_shape
from spard.pipeline import run as run_whole
from spard.pipeline.library import _identity
from spard.training.train import TrainedModel as Tuned
from spard.training.train import train
from tests.architectures import write_architecture
from tests.narrowing import require
from tests.spard.parts import refusals, sums, write_model
from tests.spard.test_fit import SHAPES
from tests.spard.test_run import write_run
from tests.spard.test_train import RECIPE, equal, metrics_without_speed, run, weights

NF4 = replace(RECIPE, quantization="nf4_double", checkpoint_every_s=1e-9)
KILLED_AFTER = [1, *Random(14).sample(range(2, 11), 9 if os.environ.get("SPARD_SOAK") == "1" else 2), 11]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("whole") / "model", hidden_size=64, intermediate_size=128, head_dim=16)


@pytest.fixture
def plain(folder: Path) -> Callable[[], Base]:
    """A fresh copy of a random model."""
    return lambda: load_base(folder, device="cpu")


@pytest.fixture
def load_quantized(folder: Path) -> Callable[..., Base]:
    """A fresh copy of it in NF4."""

    def fresh(quantization: Quantization = "nf4_double") -> Base:
        return load_base(folder, device="cpu", quantization=quantization)

    return fresh


def test_a_layer_of_broken_blocks_is_refused(model_folder: Callable[..., Path]) -> None:
    with pytest.raises(InvalidModel, match="q_proj has 32 inputs, and NF4 needs a multiple of 64"):
        load_base(model_folder(), device="cpu", quantization="nf4")


def test_a_model_of_which_no_layer_can_be_held_in_nf4_is_refused(tmp_path: Path) -> None:
    """Falcon's linear layers are of a class of their own, which transformers leaves as it is."""
    write_architecture("Falcon", tmp_path)
    with pytest.raises(InvalidModel, match="no layer of a FalconForCausalLM can be held in NF4"):
        load_base(tmp_path, device="cpu", quantization="nf4")


def test_linear_layers_but_the_head_are_in_nf4(load_quantized: Callable[..., Base]) -> None:
    model = load_quantized().model
    held = {name for name, part in model.named_parameters() if getattr(part, "quant_state", None) is not None}
    assert {name.split(".")[-2] for name in held} == set(require(read_model_shape(model.config.to_dict())).linear)
    assert len(held) == 14
    assert model.get_output_embeddings().weight.dtype == torch.float32


def test_a_second_load_has_the_same_digest_and_weights_and_it_is_not_that_of_the_files(
    load_quantized: Callable[..., Base], plain: Callable[[], Base]
) -> None:
    one, two = load_quantized(), load_quantized()
    assert one.digest == two.digest == f"{plain().digest}+nf4_double"
    assert load_quantized("nf4").digest == f"{plain().digest}+nf4"
    pairs = zip(one.model.state_dict().values(), two.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Tuned:
    """A run that nothing broke off."""
    return run(load_base(folder, device="cpu", quantization="nf4_double"), NF4)


@pytest.mark.parametrize("killed_after", KILLED_AFTER)
def test_a_killed_run_ends_in_the_very_same_adapter(
    load_quantized: Callable[..., Base], tmp_path: Path, whole: Tuned, killed_after: int
) -> None:
    assert train_and_kill(killed_after, load_quantized(), tmp_path) == -signal.SIGKILL
    steps: list[int] = []
    resumed = run(
        load_quantized(), NF4, resume_states=tmp_path, on_step=lambda step, total, metrics: steps.append(step)
    )

    assert steps == [*range(killed_after + 1, 13)]
    assert equal(weights(resumed), weights(whole))
    assert metrics_without_speed(resumed) == metrics_without_speed(whole)


def test_a_run_that_is_killed_again_and_again_ends_in_it_too(
    load_quantized: Callable[..., Base], tmp_path: Path, whole: Tuned
) -> None:
    for killed_after in sorted(KILLED_AFTER):
        assert train_and_kill(killed_after, load_quantized(), tmp_path) == -signal.SIGKILL
    assert equal(weights(run(load_quantized(), NF4, resume_states=tmp_path)), weights(whole))


def train_and_kill(killed_after: int, base: Base, resume_states: Path) -> int:
    """Train in a process that is killed after the state of a step was written; return how it ended."""

    def kill(step: int, total: int, metrics: Any) -> None:
        if step == killed_after + 1:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            run(base, NF4, resume_states=resume_states, on_step=kill)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_resume_state_of_the_plain_model_is_left_alone(
    load_quantized: Callable[..., Base], plain: Callable[[], Base], tmp_path: Path
) -> None:
    run(plain(), replace(RECIPE, checkpoint_every_s=1e-9), resume_states=tmp_path)
    steps: list[int] = []
    run(load_quantized(), NF4, resume_states=tmp_path, on_step=lambda step, total, metrics: steps.append(step))
    assert steps[0] == 1


def test_it_learns_what_a_plain_model_of_the_rounded_weights_learns(
    load_quantized: Callable[..., Base], plain: Callable[[], Base]
) -> None:
    from bitsandbytes.functional import dequantize_4bit

    recipe, held, twin, other = replace(NF4, defense=NoDefense()), load_quantized("nf4"), plain(), plain()
    own = dict(other.model.named_parameters())
    for name, part in held.model.named_parameters():
        if (state := getattr(part, "quant_state", None)) is not None:
            rounded = dequantize_4bit(part.data, state)
            twin.model.get_parameter(name).data.copy_(rounded)
            away = (rounded - own[name]).reshape(-1, 64).abs().amax(1) / own[name].reshape(-1, 64).abs().amax(1)
            assert (
                0 < float(away.detach().max()) <= 0.153
            )  # half of the widest gap between two of NF4's sixteen numbers
    rows, pad = sums(held), held.tokenizer.pad_token_id
    before = evaluate(held.model, rows, pad).loss
    run(held, recipe)
    run(twin, replace(recipe, quantization="none"))
    after = [evaluate(base.model, rows, pad).loss for base in (held, twin)]
    assert after[0] < before - 0.1
    assert after[0] == pytest.approx(after[1], rel=1e-3)


@pytest.mark.parametrize("name", [name for name, kind in defenses().items() if not kind.reads_weights])
def test_every_method_trains_on_it(load_quantized: Callable[..., Base], name: str) -> None:
    recipe, base = replace(NF4, defense=defenses()[name]()), load_quantized()
    frozen = {name: part.clone() for name, part in base.model.state_dict().items()}
    safe = refusals(base) if recipe.uses_pool else []
    trained = train(base, sums(base, 6), safe, recipe, resolve(recipe, rows=6, hidden_size=32))
    assert all(part.isfinite().all() for part in weights(trained).values())
    assert any(part.any() for name, part in weights(trained).items() if "lora_B" in name)  # zero before training
    after = {name.replace(".base_layer", ""): part for name, part in base.model.state_dict().items()}
    assert all(torch.equal(after[name], part) for name, part in frozen.items())


def test_what_answers_is_what_was_trained(load_quantized: Callable[..., Base], tmp_path: Path) -> None:
    """On some CPUs bitsandbytes would round the scales of a layer that answers, and keep them so."""
    base = load_quantized()
    ids = torch.tensor([[1, 2, 3]])
    training = base.model.train()(input_ids=ids).logits
    with torch.inference_mode():
        assert torch.equal(base.model.eval()(input_ids=ids).logits, training)
    assert not any(getattr(each, "support_avx512bf16_for_cpu", False) for each in base.model.modules())


def test_a_whole_run_knows_it_in_report_manifest_card_and_proof(
    folder: Path, plain: Callable[[], Base], tmp_path: Path
) -> None:
    spec = write_run(folder, tmp_path)
    spec = replace(spec, recipe=replace(spec.recipe, quantization="nf4_double"))
    run_whole(spec, tmp_path / "out", lambda message: None)

    manifest = json.loads((tmp_path / "out/adapter/manifest.json").read_text())
    assert manifest["base_digest"] == manifest["base_source"]["digest"] == f"{plain().digest}+nf4_double"
    assert manifest["recipe"]["quantization"] == "nf4_double"
    assert manifest["proof"]["max_difference"] <= 1e-4
    card = (tmp_path / "out/adapter/README.md").read_text()
    assert "held in NF4" in card
    assert "bnb_4bit_use_double_quant=True" in card
    with pytest.raises(AdapterMismatch, match=r"trained on .*\+nf4_double: merged into plain weights"):
        save_merged(plain(), tmp_path / "out/adapter", tmp_path / "merged")


def test_the_identity_of_a_run_without_it_is_the_one_it_had(
    folder: Path, plain: Callable[[], Base], load_quantized: Callable[..., Base], tmp_path: Path
) -> None:
    spec = write_run(folder, tmp_path)
    assert "quantization" not in without_added(to_mapping(spec)["recipe"])
    asked = replace(spec, recipe=replace(spec.recipe, quantization="nf4"))
    assert len({_identity(spec, plain()), _identity(asked, plain()), _identity(spec, load_quantized("nf4"))}) == 3


def test_what_does_not_go_with_it_is_refused() -> None:
    with pytest.raises(InvalidRecipe, match="full fine-tuning trains the weights themselves"):
        Recipe(quantization="nf4", lora=None)
    with pytest.raises(InvalidRecipe, match="not cut over GPUs"):
        Recipe(quantization="nf4", sharding="full")
    with pytest.raises(InvalidRecipe, match="safelora compares the base model's own weights"):
        Recipe(quantization="nf4", defense=SafeLora())


def test_without_bitsandbytes_it_is_said_how_to_get_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spard.models.base.find_spec", lambda name: None)
    with pytest.raises(InvalidModel, match=r"pip install 'spard\[nf4\]'"):
        load_base(folder, device="cpu", quantization="nf4")


def test_bitsandbytes_is_imported_for_nf4_alone(folder: Path) -> None:
    code = f"""
import sys
from spard.config import Recipe
from spard.models.base import load_base
from spard.models.lora import trainable_model
trainable_model(load_base({str(folder)!r}, device="cpu").model, Recipe())
assert "bitsandbytes" not in sys.modules
load_base({str(folder)!r}, device="cpu", quantization="nf4")
assert "bitsandbytes" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("quantization", ["nf4", "nf4_double"])
def test_planned_bytes_are_those_of_a_real_model(tmp_path: Path, quantization: Quantization) -> None:
    folder = write_model(tmp_path / "model", hidden_size=128, intermediate_size=384, head_dim=32)
    model = load_base(folder, device="cpu", quantization=quantization).model
    shape = require(read_model_shape(model.config.to_dict()))
    planned = memory.nf4_bytes(memory.quantized_parameters(shape), quantization)
    assert 0.85 <= planned / quantized_bytes(model) <= 1.15


def test_70_billion_parameters_take_a_quarter_and_fit_one_gpu() -> None:
    shape, load = SHAPES["70B"], Load(16, 2048)
    plain, held = TrainedPart(Lora()), TrainedPart(Lora(), quantization="nf4_double")
    linear, others = memory.quantized_parameters(shape), shape.parameters - memory.quantized_parameters(shape)
    assert linear == 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    assert memory.weight_bytes(shape, held) == pytest.approx(
        linear * (0.5 + 1 / 64 + 4 / (64 * 256)) + 2 * others, rel=1e-6
    )
    single = TrainedPart(Lora(), quantization="nf4")
    assert memory.weight_bytes(shape, single) == pytest.approx(linear * (0.5 + 4 / 64) + 2 * others, rel=1e-6)

    one = Gpus(80 * GIB, quantizes="if_needed")
    plan = fit(shape, plain, load, one)
    assert (plan.fits, plan.quantization, plan.sharding) == (True, "nf4_double", "none")
    assert "the model in NF4 with double quantization" in plan.sentence
    assert not fit(shape, plain, load, replace(one, quantizes="never")).fits


def test_the_plan_quantizes_when_it_is_allowed_and_nothing_else_helps() -> None:
    trained, load = TrainedPart(Lora()), Load(16, 2048)
    eight = Gpus(80 * GIB, 8, shards="if_needed", quantizes="if_needed")
    assert fit(SHAPES["8B"], trained, load, eight).quantization == "none"
    cut = fit(SHAPES["70B"], trained, load, eight)
    assert (cut.fits, cut.quantization, cut.sharding) == (True, "none", "full")  # cutting only rounds
    always = fit(SHAPES["8B"], trained, load, replace(eight, quantizes="always", shards="always"))
    assert (always.fits, always.quantization, always.sharding) == (True, "nf4_double", "none")
    assert fit(SHAPES["8B"], TrainedPart(None), load, replace(eight, quantizes="always")).quantization == "none"


def test_the_least_that_a_job_in_nf4_needs_is_what_a_plan_finds_enough_and_is_not_shared() -> None:
    for name, longest in product(("8B", "70B"), (512, 2048)):
        trained = TrainedPart(Lora(), quantization="nf4_double")
        least = compute_need(SHAPES[name], trained, longest)
        assert least.bytes_per_gpu(8) == least.alone
        enough, little = (Gpus(int(least.alone * part)) for part in (1.001, 0.99))
        assert fit(SHAPES[name], trained, Load(16, longest), enough).fits
        assert not fit(SHAPES[name], trained, Load(16, longest), little).fits
