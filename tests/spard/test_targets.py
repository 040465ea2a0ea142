"""What LoRA adapts by default, told from the model itself and from its files, and what it cannot adapt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as OF_PEFT
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MixtralConfig

from spard.config import Lora, NoDefense, Recipe
from spard.errors import UnsupportedModule
from spard.models.adapters import save_adapter
from spard.models.base import load_base
from spard.models.lora import inspect_layout, lora_reach, trainable_model
from spard.models.peft import BaseTunerLayer
from spard.models.shapes import read_layout
from spard.models.targets import QKVO, adapted_layers, reach, refusal
from tests.architectures import ARCHITECTURES, make_model
from tests.narrowing import require
from tests.spard.parts import SIZES, write_model
from worker.failures import Fault, failure

MLA = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
QWEN_LINEAR = {*QKVO, "in_proj_qkv", "in_proj_z", "out_proj"}
OTHERS: dict[str, set[str]] = {  # than q, k, v, o
    "Qwen3-Next": {*QKVO, "in_proj_qkvz", "out_proj"},
    "Qwen3.5": QWEN_LINEAR,
    "Qwen3.5 MoE": QWEN_LINEAR,
    "Phi-2": {"q_proj", "k_proj", "v_proj", "dense"},
    "Phi-3, Phi-4": {"qkv_proj", "o_proj"},
    "Pythia (GPT-NeoX)": {"query_key_value", "dense"},
    "GPT-2": {"c_attn", "attn.c_proj"},
    "GPT-J": {"q_proj", "k_proj", "v_proj", "out_proj"},
    "StarCoder (GPT-BigCode)": {"c_attn", "attn.c_proj"},
    "Falcon": {"query_key_value", "dense"},
    "Falcon 40B": {"query_key_value", "dense"},
    "Falcon Mamba": {"in_proj"},
    "Mamba 2": {"in_proj"},
    "DeepSeek-V2": MLA,
    "DeepSeek-V3": MLA,
    "Granite 4 (hybrid)": {*QKVO, "in_proj"},
    "MPT": {"Wqkv", "out_proj"},
    "BLOOM": {"query_key_value", "dense"},
    "OPT": {"q_proj", "k_proj", "v_proj", "out_proj"},
    "Nemotron-H": {*QKVO, "in_proj"},
    "LFM2": {"q_proj", "k_proj", "v_proj", "out_proj", "in_proj"},
    "Jamba": {*QKVO, "in_proj"},
    "RecurrentGemma": {*QKVO, "linear_x", "linear_y", "linear_out"},
    "MiniMax": {*QKVO, "qkv_proj", "output_gate", "out_proj"},
    "RWKV": {"attention.key", "attention.value", "attention.receptance", "output"},
}
WITHOUT_MIXER = {"Nemotron-H": 1}  # layers that are nothing but a feed-forward layer
IMAGES = "Gemma 3 (with images)"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_default_is_the_attention_of_every_layer(name: str) -> None:
    with torch.device("meta"):
        found = lora_reach(make_model(name))
    assert found.layers == found.of_layers - WITHOUT_MIXER.get(name, 0) > 0
    if name != IMAGES:
        assert set(found.target_modules) == OTHERS.get(name, set(QKVO))


def test_where_it_named_q_k_v_o_before_the_adapter_is_the_same() -> None:
    model = make_model("Qwen3")
    torch.manual_seed(7)
    usual: dict[str, Any] = {"r": 16, "lora_alpha": 16.0, "bias": "none", "task_type": "CAUSAL_LM"}
    former = get_peft_model(make_model("Qwen3"), LoraConfig(**usual, target_modules=list(QKVO)))
    own = trainable_model(model, Recipe(seed=7))
    expected, found = get_peft_model_state_dict(former), get_peft_model_state_dict(own)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_whatever_peft_adapts_by_its_own_mapping_is_reached() -> None:
    """But for the feed-forward layers that its names choose in Phi and RWKV."""
    kinds = {kind: name for name, (kind, _) in ARCHITECTURES.items() if isinstance(OF_PEFT.get(kind), list)}
    assert len(kinds) >= 15
    for kind, name in kinds.items():
        with torch.device("meta"):
            layout = inspect_layout(make_model(name))
        chosen = {each.path for each in adapted_layers(layout, reach(layout).target_modules)}
        theirs = {
            each.path
            for each in adapted_layers(layout, OF_PEFT[kind])
            if not each.block.endswith(("mlp", "feed_forward"))
        }
        assert theirs <= chosen, kind


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_s_files_tell_the_same(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path)
    loaded, stored = inspect_layout(model), require(read_layout(tmp_path))
    of_model, of_files = reach(loaded), reach(stored)
    assert set(of_files.display_names) == set(of_model.display_names)
    assert (of_files.layers, of_files.of_layers) == (of_model.layers, of_model.of_layers)
    assert (stored.tied_head is None, stored.has_experts) == (loaded.tied_head is None, loaded.has_experts)
    if name != "MiniMax":  # whose files hold tables that are no parameters
        assert of_files.share == pytest.approx(of_model.share, abs=0.02)


def test_the_vision_tower_is_left_alone_whatever_a_job_names(tmp_path: Path) -> None:
    for targets in (None, ("q_proj", "v_proj")):
        model = trainable_model(make_model(IMAGES), Recipe(lora=Lora(target_modules=targets)))
        touched = [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
        assert len(touched) == 2 * (4 if targets is None else 2)
        assert all("language_model" in name for name in touched)


def test_an_adapter_of_gpt_2_says_that_its_weights_lie_the_other_way(tmp_path: Path) -> None:
    make_model("GPT-2").save_pretrained(tmp_path / "model")
    write_model(tmp_path / "tokenizer")
    for path in (tmp_path / "tokenizer").glob("*token*"):
        path.rename(tmp_path / "model" / path.name)
    base = load_base(tmp_path / "model", device="cpu")
    save_adapter(trainable_model(base.model, Recipe()), base, "tiny", tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["fan_in_fan_out"], config["target_modules"]) == (True, ["attn.c_proj", "c_attn"])


REFUSED: dict[str, tuple[str, Sequence[str], str]] = {
    "tied": ("Qwen2.5", ("q_proj", "lm_head"), "lm_head is tied to the embeddings"),
    "embeddings": ("Llama 3.1", ("embed_tokens",), "embed_tokens is no linear layer"),
    "unknown": ("Llama 3.1", ("q_proj", "query"), "the model has no query; it has down_proj, gate_proj"),
    "an experts' tensor": ("Mixtral", ("experts",), "experts is no linear layer"),
    "a router": ("Phi-3.5 MoE", ("router",), "router is no linear layer"),
    "a state space": ("Granite 4 (hybrid)", ("q_proj", "out_proj"), "would pass an adapter by"),
    "another state space": ("Falcon-H1", ("mamba.out_proj",), "of a state space name in_proj alone"),
    "a head alone": ("Llama 3.1", ("lm_head",), "lm_head alone changes no hidden state"),
}


@pytest.mark.parametrize(("name", "targets", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_adapted_is_refused_with_the_reason(
    name: str, targets: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModule, match=reason) as refused:
        trainable_model(model, Recipe(lora=Lora(target_modules=targets)))
    told = failure(refused.value)
    assert (told.code, told.param, told.retryable, told.fault) == (
        "unsupported_module",
        "lora.target_modules",
        False,
        Fault.job,
    )
    if name != "Phi-3.5 MoE":  # whose files call the router `gate`
        assert reason in require(refusal(require(read_layout(tmp_path)), targets, has_anchor=True))


def test_a_head_of_its_own_can_be_adapted_where_no_anchor_holds_the_states() -> None:
    recipe = Recipe(lora=Lora(target_modules=("lm_head",)), defense=NoDefense())
    model = trainable_model(make_model("Llama 3.1"), recipe)
    assert [name for name, part in model.named_parameters() if part.requires_grad] == [
        f"base_model.model.lm_head.lora_{half}.default.weight" for half in "AB"
    ]


def test_a_model_without_anything_like_attention_asks_for_names() -> None:
    layout = replace(inspect_layout(make_model("Llama 3.1")), stack="elsewhere")
    assert reach(layout).target_modules == ()


def test_the_reach_reads_as_a_sentence() -> None:
    sizes: dict[str, Any] = {**SIZES, "num_hidden_layers": 12}
    with torch.device("meta"):
        plain = lora_reach(AutoModelForCausalLM.from_config(LlamaConfig(**sizes)))
        experts = lora_reach(AutoModelForCausalLM.from_config(MixtralConfig(**sizes, num_local_experts=4)))
    assert plain.sentence.startswith("q_proj, k_proj, v_proj, o_proj; reaches 12 of 12 layers, ")
    assert plain.sentence.endswith(" % of the parameters")
    assert experts.sentence.endswith("; experts and their router are left out")


@pytest.mark.parametrize("kind", ["mtp", "vision"])
def test_layers_beside_the_language_model_s_are_not_counted(kind: str, tmp_path: Path) -> None:
    """Files of DeepSeek-V3 hold a layer past the last, and files that see images a tower with more layers."""
    config = AutoConfig.for_model("llama", **SIZES)
    config.save_pretrained(tmp_path)
    layers = [f"model.layers.{i}" for i in range(2)]
    layers += ["model.layers.2"] if kind == "mtp" else [f"vision_tower.layers.{i}" for i in range(5)]
    header: dict[str, Any] = {
        f"{each}.self_attn.{leaf}.weight": {"shape": [32, 32]} for each in layers for leaf in QKVO
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    found = reach(require(read_layout(tmp_path)))
    assert (found.layers, found.of_layers) == (2, 2)
