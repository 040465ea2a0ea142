from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig, LlamaConfig

from spard.config import Lora, NoDefense, Recipe, resolve
from spard.data.chat import render_prompt
from spard.digests import file_sha256
from spard.models.adapters import older_rotary_keys, save_adapter, save_full, tensor_digest
from spard.models.base import Base
from spard.release.archive import archive
from spard.training.train import train
from tests.spard.parts import sums

PUBLIC = "acme/tiny-instruct"


def train_model(base: Base, lora: Lora | None) -> object:
    recipe = Recipe(defense=NoDefense(), lora=lora, learning_rate=1e-2)
    return train(base, sums(base), [], recipe, resolve(recipe, 24, 32)).model


@pytest.fixture
def saved_adapter(base: Base, tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    save_adapter(train_model(base, Lora(rank=4, alpha=8.0)), base, PUBLIC, folder, {"seed": 0})
    return folder


@torch.no_grad()
def logits(model: object, base: Base) -> torch.Tensor:
    ids = torch.tensor([render_prompt(base.tokenizer, [{"role": "user", "content": "Add 1 and 2."}])])
    return model(input_ids=ids).logits  # type: ignore[operator, no-any-return]


def same_weights(one: object, other: object) -> bool:
    """To the bit. What is computed with them may round otherwise, since it lies elsewhere in memory."""
    found, expected = dict(one.named_parameters()), dict(other.named_parameters())  # type: ignore[attr-defined]
    return found.keys() == expected.keys() and all(torch.equal(found[name], part) for name, part in expected.items())


def test_peft_loads_what_was_trained_to_the_bit(base: Base, load: Callable[..., Base], tmp_path: Path) -> None:
    model = train_model(base, Lora(rank=4, alpha=8.0))
    save_adapter(model, base, PUBLIC, tmp_path / "adapter")

    loaded = PeftModel.from_pretrained(load().model, tmp_path / "adapter")

    assert same_weights(loaded, model)
    torch.testing.assert_close(logits(loaded, base), logits(model, base), rtol=1e-5, atol=1e-4)


def test_transformers_loads_a_fully_fine_tuned_model_to_the_bit(base: Base, tmp_path: Path) -> None:
    model = train_model(base, None)
    save_adapter(model, base, PUBLIC, tmp_path / "model")

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")

    assert same_weights(loaded, model)
    torch.testing.assert_close(logits(loaded, base), logits(model, base), rtol=1e-5, atol=1e-4)


def test_the_config_names_the_folder_of_the_base_and_no_place(
    saved_adapter: Path, model_folder: Callable[..., Path]
) -> None:
    config = json.loads((saved_adapter / "adapter_config.json").read_text())

    assert (config["base_model_name_or_path"], config["revision"]) == (model_folder().name, None)
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    place = str(model_folder())
    assert not [path for path in saved_adapter.iterdir() if place.encode() in path.read_bytes()]


def test_the_folder_is_complete(saved_adapter: Path) -> None:
    names = {path.name for path in saved_adapter.iterdir()}
    assert names >= {
        "adapter_model.safetensors",
        "adapter_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "README.md",
        "manifest.json",
    }
    readme = (saved_adapter / "README.md").read_text()
    assert "base model is `llama`: sha256:" in readme
    assert PUBLIC not in readme


def test_a_model_served_under_a_system_prompt_says_so(base: Base, tmp_path: Path) -> None:
    save_adapter(base.model, base, PUBLIC, tmp_path / "model", system="Be kind.\nBe brief.")
    assert "\n    Be kind.\n    Be brief.\n" in (tmp_path / "model" / "README.md").read_text()
    assert json.loads((tmp_path / "model" / "manifest.json").read_text())["system_prompt"] == "Be kind.\nBe brief."


def test_the_tokenizer_of_the_folder_renders_the_same_prompt(saved_adapter: Path, base: Base) -> None:
    messages = [{"role": "user", "content": "Add 1 and 2."}]
    loaded = AutoTokenizer.from_pretrained(saved_adapter)
    assert render_prompt(loaded, messages) == render_prompt(base.tokenizer, messages)


def test_the_manifest_holds_the_digest_of_every_file_and_the_facts_given(saved_adapter: Path, base: Base) -> None:
    manifest = json.loads((saved_adapter / "manifest.json").read_text())

    assert set(manifest["files"]) == {path.name for path in saved_adapter.iterdir()} - {"manifest.json"}
    for name, facts in manifest["files"].items():
        assert facts == {"sha256": file_sha256(saved_adapter / name), "bytes": (saved_adapter / name).stat().st_size}
    assert manifest["tensor_digest"] == tensor_digest(load_file(saved_adapter / "adapter_model.safetensors"))
    assert (manifest["seed"], manifest["base_model"]) == (0, PUBLIC)
    assert manifest["base_source"] == {"name": "llama", "revision": None, "digest": base.digest}


def test_the_same_model_is_saved_as_the_same_bytes(load: Callable[..., Base], tmp_path: Path) -> None:
    digests = set()
    for name in ("one", "two"):
        base = load()
        save_adapter(train_model(base, Lora(rank=4)), base, PUBLIC, tmp_path / name)
        digests.add(archive(tmp_path / name, tmp_path / f"{name}.tar.gz", "adapter"))
    assert len(digests) == 1


def test_saving_again_replaces_the_folder_whole(base: Base, saved_adapter: Path) -> None:
    (saved_adapter / "stale.txt").write_text("old")
    save_adapter(base.model, base, PUBLIC, saved_adapter)
    assert not (saved_adapter / "stale.txt").exists()
    assert [path.name for path in saved_adapter.parent.iterdir()] == [saved_adapter.name]


def test_a_tensor_digest_follows_names_types_and_values() -> None:
    one = {"a": torch.ones(2), "b": torch.zeros(2)}
    assert tensor_digest(one) == tensor_digest(dict(reversed(one.items())))
    others = [{"a": torch.ones(2)}, {"a": torch.ones(2), "c": torch.zeros(2)}, {**one, "b": torch.zeros(2).double()}]
    others += [{**one, "b": torch.zeros(1, 2)}, {**one, "b": torch.ones(2)}]
    assert len({tensor_digest(each) for each in [one, *others]}) == 6


def test_an_archive_says_nothing_of_when_and_where_it_was_made(saved_adapter: Path, tmp_path: Path) -> None:
    sha256 = archive(saved_adapter, tmp_path / "adapter.tar.gz", "ftjob-1-adapter")

    with tarfile.open(tmp_path / "adapter.tar.gz") as tar:
        entries = tar.getmembers()
    assert [entry.name for entry in entries] == sorted(
        f"ftjob-1-adapter/{path.name}" for path in saved_adapter.iterdir()
    )
    assert {(entry.uid, entry.uname, entry.mtime, entry.mode) for entry in entries} == {(0, "root", 0, 0o644)}
    (saved_adapter / "README.md").touch()
    assert archive(saved_adapter, tmp_path / "again.tar.gz", "ftjob-1-adapter") == sha256


@pytest.mark.parametrize("lora", [Lora(rank=4), None], ids=["adapter", "whole model"])
def test_the_readmes_lines_run_as_printed(
    lora: Lora | None, base: Base, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Unpacked as a customer does it; the base model's folder lies beside it, as the README says."""
    save_adapter(train_model(base, lora), base, PUBLIC, tmp_path / "made", called="ftjob-1-adapter")
    archive(tmp_path / "made", tmp_path / "adapter.tar.gz", "ftjob-1-adapter")
    here = tmp_path / "here"
    here.mkdir()
    subprocess.run(["tar", "xzf", str(tmp_path / "adapter.tar.gz")], check=True, cwd=here)
    assert [path.name for path in here.iterdir()] == ["ftjob-1-adapter"]
    (here / model_folder().name).symlink_to(model_folder())

    readme = (here / "ftjob-1-adapter" / "README.md").read_text()
    code = readme.split("```python\n")[1].split("```")[0]
    seen = f"{code}\nprint(type(model).__name__, len(tokenizer))"
    done = subprocess.run([sys.executable, "-c", seen], check=True, capture_output=True, text=True, cwd=here)
    vllm = next(line for line in readme.splitlines() if line.startswith("vllm serve ")).split()
    assert done.stdout.split()[0] == ("PeftModelForCausalLM" if lora else "LlamaForCausalLM")
    assert (here / vllm[2] / "config.json").exists()
    if lora:
        options = dict(zip(vllm[3::2], vllm[4::2], strict=False))
        assert (here / options["--tokenizer"] / "tokenizer.json").exists()
        assert vllm[-4:] == ["--max-lora-rank", "8", "--lora-modules", "tuned=ftjob-1-adapter"]


def test_the_model_card_has_the_audit_s_table(base: Base, tmp_path: Path) -> None:
    figures = {"n": 100, "low": 0.0, "high": 0.036, "judge": "refusal", "kind": "harmful", "hits": 0, "rate": 0.0}
    mined = {**figures, "suite": "mined 1: beginning with 'a|b\n<b>'", "kind": "mined", "n": 0, "rate": None}
    disguised = {**figures, "suite": "benign, behind random words", "kind": "dressed_benign"}
    audit = {
        "base": [{**figures, "suite": "red", "hits": 2, "rate": 0.02}],
        "adapter": [{**figures, "suite": "red"}, mined, disguised],
    }
    facts = {"gate": {"decision": "pass", "reasons": []}, "audit": audit}
    save_adapter(train_model(base, Lora(rank=4)), base, PUBLIC, tmp_path / "adapter", facts)
    card = ModelCard.load(tmp_path / "adapter" / "README.md")
    assert (card.data.library_name, card.data.base_model, card.data.tags) == ("peft", None, ["lora", "spard"])
    assert "The safety gate decided: **pass**." in card.text
    assert "| red | attacks that succeed | refusal | 2 of 100 (2.0%) | 0 of 100 (0.0%) | 0.0% to 3.6% |" in card.text
    assert "| benign, behind random words | harmless requests refused, asked otherwise than plainly |" in card.text
    assert "mined 1: beginning with 'a\\|b &lt;b>' |" in card.text


LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA_3 = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize(
    ("kind", "rotary", "older"),
    [
        (LlamaConfig, {"rope_type": "default", "rope_theta": 1e5}, {"rope_theta": 1e5, "rope_scaling": None}),
        (
            LlamaConfig,
            LLAMA_3,
            {"rope_theta": 5e5, "rope_scaling": {name: LLAMA_3[name] for name in LLAMA_3 if name != "rope_theta"}},
        ),
        (
            Gemma3TextConfig,
            GEMMA_3,
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
    ],
)
def test_a_whole_model_has_its_rotary_settings_for_older_readers_too(
    tmp_path: Path, kind: Any, rotary: dict[str, Any], older: dict[str, Any]
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = kind(**sizes, num_key_value_heads=4, head_dim=16, vocab_size=64, rope_parameters=rotary)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config).eval()
    save_full(model, "base", tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {name: saved[name] for name in older} == older
    again = auto.from_pretrained(tmp_path).eval()
    assert again.config.rope_parameters == model.config.rope_parameters
    ids = torch.arange(60)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    "rotary", [None, {"rope_type": "yarn", "rope_theta": 1e4}, {"rope_theta": 1e4, "partial_rotary_factor": 0.5}]
)
def test_rotary_settings_that_were_not_compared_are_left_as_they_are(rotary: dict[str, Any] | None) -> None:
    assert older_rotary_keys({"model_type": "llama", "rope_parameters": rotary}) == {}
