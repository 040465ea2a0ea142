"""An archive stands alone: it names the base model that others can get, and brings that model's own tokenizer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

from spard.data.chat import PLAIN_TEMPLATE, render_prompt
from spard.models.adapters import save_adapter
from spard.models.base import Base, load_base

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB_ID = "acme-labs/tiny-8b-instruct"
# What transformers 4 has in such a file, and what the installed one writes when it saves the tokenizer again.
SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
LOADED = """
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer
AutoTokenizer.from_pretrained({folder!r})
print(AutoPeftModelForCausalLM.from_pretrained({folder!r}).get_base_model().config._name_or_path)
"""


@pytest.fixture
def hub(model_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """A hub's cache that holds the model, as its client lays it out: a snapshot of links to blobs."""
    repository = tmp_path / "home" / "hub" / f"models--{HUB_ID.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    model = shutil.copytree(model_folder(), tmp_path / "plain")
    settings = json.loads((model / "tokenizer_config.json").read_text()) | SETTINGS
    (model / "tokenizer_config.json").write_text(json.dumps({name: settings[name] for name in SETTINGS}))
    for path in model.iterdir():
        blob = repository / "blobs" / f"{path.name}.blob"
        path.rename(blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return repository.parent


def save_small_adapter(base: Base, folder: Path) -> dict[str, Any]:
    model = get_peft_model(base.model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    return save_adapter(model, base, "fast", folder)


def test_the_snapshot_of_a_hub_is_named_by_its_id_and_commit(hub: Path, tmp_path: Path) -> None:
    (snapshot,) = hub.glob("*/snapshots/*")
    manifest = save_small_adapter(load_base(snapshot, device="cpu"), tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    readme = (tmp_path / "adapter" / "README.md").read_text()

    assert (config["base_model_name_or_path"], config["revision"]) == (HUB_ID, COMMIT)
    assert f"\nbase_model: {HUB_ID}\n" in readme
    assert f"base model is `{HUB_ID}` at commit `{COMMIT}`" in readme
    assert f"vllm serve {HUB_ID} --revision {COMMIT} " in readme
    assert manifest["base_model"] == "fast"
    assert (manifest["base_source"]["name"], manifest["base_source"]["revision"]) == (HUB_ID, COMMIT)


def test_peft_finds_the_base_by_itself(hub: Path, tmp_path: Path) -> None:
    (snapshot,) = hub.glob("*/snapshots/*")
    save_small_adapter(load_base(snapshot, device="cpu"), tmp_path / "adapter")
    code = LOADED.format(folder=str(tmp_path / "adapter"))
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(hub.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [HUB_ID]


def test_the_tokenizer_is_the_base_models_to_the_byte(hub: Path, tmp_path: Path) -> None:
    (snapshot,) = hub.glob("*/snapshots/*")
    save_small_adapter(load_base(snapshot, device="cpu"), tmp_path / "adapter")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "adapter" / name).read_bytes() == (snapshot / name).read_bytes()
        assert not (tmp_path / "adapter" / name).is_symlink()


def test_a_base_without_a_template_leaves_the_one_it_was_trained_with(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    model = shutil.copytree(model_folder(), tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    base = load_base(model, device="cpu")
    save_small_adapter(base, tmp_path / "adapter")

    settings = json.loads((tmp_path / "adapter" / "tokenizer_config.json").read_text())
    own = json.loads((model / "tokenizer_config.json").read_text())
    assert settings == own | {"chat_template": PLAIN_TEMPLATE}
    messages = [{"role": "user", "content": "Add 1 and 2."}]
    again = AutoTokenizer.from_pretrained(tmp_path / "adapter")
    assert render_prompt(again, messages) == render_prompt(base.tokenizer, messages)
