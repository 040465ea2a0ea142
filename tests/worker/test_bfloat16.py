"""In bfloat16, as on a GPU: what was trained is what a clean process loads, and what an engine answers with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from spard.config.quantization import Quantization
from spard.errors import AdapterNotProved
from spard.models.adapters import tensor_digest
from spard.models.base import load_base
from spard.models.lora import WEIGHTS
from spard.models.peft import get_peft_model_state_dict
from spard.pipeline import run as run_whole
from spard.pipeline.base_figures import base_figures
from spard.pipeline.context import Context, NoCache
from spard.pipeline.messages import Reporter
from spard.pipeline.rows import prepare
from tests.spard.parts import write_model
from tests.spard.test_run import write_run
from worker.engine.adapters import probe

HELD: tuple[Quantization, ...] = ("none", "nf4", "nf4_double")
NEAR = 0.005  # of the largest logit: a rounding that is another one is three times as far in the tests' model


@pytest.fixture(scope="module", params=HELD)
def quantization(request: pytest.FixtureRequest) -> Quantization:
    found: Quantization = request.param
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", hidden_size=64, intermediate_size=128, head_dim=16)


@pytest.fixture(scope="module")
def adapter(quantization: Quantization, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapter of a whole run in 16 bits, which a clean process has proved."""
    folder = tmp_path_factory.mktemp("run")
    spec = write_run(model, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARD_CPU_DTYPE", "bfloat16")
        run_whole(
            replace(spec, recipe=replace(spec.recipe, quantization=quantization)), folder / "out", lambda message: None
        )
    return folder / "out" / "adapter"


class Keys(NoCache):
    """A cache that keeps nothing, and notes the keys that it is asked for."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def tensor(self, kind: str, key: Mapping[str, Any], make: Callable[[], Tensor]) -> Tensor:
        self.asked.add(json.dumps([kind, key], sort_keys=True))
        return make()

    def json(self, kind: str, key: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        self.asked.add(json.dumps([kind, key], sort_keys=True))
        return make()


def test_what_was_measured_in_float32_is_not_taken_for_what_a_gpu_measures(model: Path, tmp_path: Path) -> None:
    spec, found = write_run(model, tmp_path), []
    for dtype in (torch.float32, torch.bfloat16):
        base, keys = load_base(model, device="cpu", dtype=dtype), Keys()
        context = Context(spec, base, Reporter(lambda message: None), cache=keys)
        base_figures(context, prepare(context).examples)
        found.append({each for each in keys.asked if not each.startswith('["pools"')})
    assert len(found[0]) == len(found[1]) > 3
    assert not found[0] & found[1]


@pytest.fixture
def serve_adapter(quantization: Quantization, model: Path) -> Callable[[Path], tuple[PeftModel, Any]]:
    """The model of an engine that holds an adapter, and its tokenizer."""

    def load(adapter: Path) -> tuple[PeftModel, Any]:
        base = load_base(model, device="cpu", dtype=torch.bfloat16, quantization=quantization)
        return PeftModel.from_pretrained(base.model, adapter, adapter_name="own").eval(), base.tokenizer

    return load


def test_a_clean_process_sees_what_was_trained(adapter: Path) -> None:
    proof = json.loads((adapter / "manifest.json").read_text())["proof"]
    assert proof["max_difference"] < NEAR
    assert proof["difference_to_base"] > 0.1


def test_an_engine_is_proved_by_the_rounding_of_its_layers(
    adapter: Path, serve_adapter: Callable[[Path], tuple[PeftModel, Any]]
) -> None:
    model, tokenizer = serve_adapter(adapter)
    proof = probe(model, tokenizer, "own", adapter, _digest(model), [])
    assert proof["max_difference"] < NEAR
    assert proof["difference_to_base"] > 0.1


def test_an_engine_with_other_weights_is_not(
    adapter: Path, serve_adapter: Callable[[Path], tuple[PeftModel, Any]], tmp_path: Path
) -> None:
    model, tokenizer = serve_adapter(adapter)
    weights = load_file(adapter / WEIGHTS)
    save_file({name: part * 1.5 if "lora_B" in name else part for name, part in weights.items()}, tmp_path / WEIGHTS)
    (tmp_path / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    with pytest.raises(AdapterNotProved, match="away from the signed adapter's"):
        probe(model, tokenizer, "own", tmp_path, _digest(model), [])


def _digest(model: PeftModel) -> str:
    held = get_peft_model_state_dict(model, adapter_name="own", save_embedding_layers=False)
    return tensor_digest({name: part.contiguous() for name, part in held.items()})
