"""The archive in other people's hands: PEFT and transformers of some version, on the base model's folder.

`python -m ... BASE ADAPTER`; nothing of ours, and no service.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.clients.scripts.checks import Check, tell

BASE, ADAPTER = map(Path, sys.argv[1:3])
CHAT = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "hello"}]


def _base() -> Any:
    return AutoModelForCausalLM.from_pretrained(BASE).eval()


@cache
def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(ADAPTER)


def _logits(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids).logits
    return found


def weights() -> None:
    plain, base = _logits(_base()), _base()
    moved = (_logits(PeftModel.from_pretrained(base, ADAPTER)) - plain).abs().max().item()
    assert moved > 1e-3, moved


def check_merged_matrices() -> None:
    """Each merged matrix is W + scale B A, computed here from the files."""
    base = _base()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    after = PeftModel.from_pretrained(base, ADAPTER).merge_and_unload().state_dict()
    config = json.loads((ADAPTER / "adapter_config.json").read_text())
    scale, lora = config["lora_alpha"] / config["r"], load_file(ADAPTER / "adapter_model.safetensors")
    parts = [name.removesuffix(".lora_A.weight") for name in lora if name.endswith(".lora_A.weight")]
    assert parts
    for part in parts:
        name = part.removeprefix("base_model.model.") + ".weight"
        expected = before[name] + scale * lora[f"{part}.lora_B.weight"] @ lora[f"{part}.lora_A.weight"]
        assert torch.allclose(after[name], expected, atol=1e-5), name


def same_as_saved() -> None:
    assert set(load_file(ADAPTER / "adapter_model.safetensors"))
    loaded = PeftModel.from_pretrained(_base(), ADAPTER).state_dict()
    for name, value in load_file(ADAPTER / "adapter_model.safetensors").items():
        assert torch.equal(loaded[name.replace(".weight", ".default.weight")], value), name


def tokenizer() -> None:
    base = AutoTokenizer.from_pretrained(BASE)
    for text in ("hello there", "What is 3 plus 4?", "a\nb  c"):
        ids = _tokenizer()(text)["input_ids"]
        assert ids == base(text)["input_ids"]
        assert ids
    assert _tokenizer().eos_token_id == base.eos_token_id


def template() -> None:
    base = AutoTokenizer.from_pretrained(BASE)
    said = _tokenizer().apply_chat_template(CHAT, tokenize=False)
    assert said == base.apply_chat_template(CHAT, tokenize=False)
    assert "hello there" in said


def generates() -> None:
    """The lines of the archive's README, given the base model's folder."""
    model = PeftModel.from_pretrained(_base(), ADAPTER)
    text = _tokenizer().apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    ids = _tokenizer()(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    assert model.generate(input_ids=ids, max_new_tokens=4, do_sample=False).shape[1] > ids.shape[1]


def base_found() -> None:
    """The adapter names the base model's folder, which lies in the current one."""
    assert torch.equal(
        _logits(AutoPeftModelForCausalLM.from_pretrained(ADAPTER)), _logits(PeftModel.from_pretrained(_base(), ADAPTER))
    )


CHECKS: dict[str, Check] = {
    "weights": weights,
    "weights as saved": same_as_saved,
    "merged": check_merged_matrices,
    "tokenizer": tokenizer,
    "chat template": template,
    "generates": generates,
    "base found by its name": base_found,
}

if __name__ == "__main__":
    tell(CHECKS)
