"""A base model is tried before jobs depend on it: whatever is wrong with it is one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, LlamaModel

from spard.commands import check_model
from spard.data.template_card import PROBES, PROBES_TITLE
from tests.architectures import make_model, write_architecture


@pytest.fixture
def model(model_folder: Callable[..., Path], tmp_path: Path) -> Path:
    return shutil.copytree(model_folder(), tmp_path / "tiny")


def without_end_token(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in settings.items() if name != "eos_token"}))


def bad_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('not today') }}")


def silent_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")


def not_finite(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({name: part * torch.nan for name, part in load_file(path).items()}, path, metadata={"format": "pt"})


def truncate_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def with_one_adapter_for_all(folder: Path) -> None:
    """PEFT tells rows of such a model not apart."""
    make_model("MPT").save_pretrained(folder)


def with_a_cache_of_its_own(folder: Path) -> None:
    make_model("MiniMax").save_pretrained(folder)


FAULTS: dict[Callable[[Path], None], str] = {
    without_tokenizer: "tokenizer",
    without_end_token: "end-of-text token",
    bad_template: "chat template",
    silent_template: "chat template",
    not_finite: "not finite",
    truncate_weights: "cannot be loaded",
    with_one_adapter_for_all: "PEFT gives all rows of a MptForCausalLM one adapter",
    with_a_cache_of_its_own: "it cannot write replies as they are written here: MiniMax uses cache of its own",
}


@pytest.mark.parametrize("spoil", FAULTS, ids=lambda spoil: spoil.__name__)
def test_what_is_wrong_is_one_line(
    spoil: Callable[[Path], None], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(model)
    assert check_model.main([str(model)]) == 1
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert FAULTS[spoil] in told.err


def test_a_model_that_works_passes(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_model.main([str(model)]) == 0
    checked, adapter, *template = capsys.readouterr().out.splitlines()
    assert "a forward pass" in checked
    assert adapter.startswith("LoRA default: q_proj, k_proj, v_proj, o_proj; reaches 2 of 2 layers, ")
    assert template[:2] == ["chat template: each answer ends with <|end|>", "chat template: engines stop at <|end|>"]
    assert "chat template: not trained: a speaker's name (the template leaves out /messages/0/name)" in template
    probes = template[template.index(f"{PROBES_TITLE}:") + 1 :]
    assert probes[0] == "  one turn:"
    assert "[It is four.<|end|>]" in probes[1]
    assert [line.strip().partition(":")[0] for line in probes if not line.startswith("    ")] == list(PROBES)
    assert max(map(len, probes)) <= 110


def test_how_fast_a_model_is_is_told_for_estimates(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_model.main([str(model), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rates = found["rates"]
    assert found["parameters"] > 1000
    assert set(rates) == {"generated_per_s", "reply_tokens", "trained_per_s", "load_s"}
    assert min(rates.values()) > 0


def test_what_an_adapter_reaches_is_told_of_any_target_modules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_architecture("Qwen3.5", tmp_path))
    assert check_model.main([folder]) == 0
    assert "reaches 4 of 4 layers" in capsys.readouterr().out
    assert check_model.main([folder, "--target-modules", "q_proj,v_proj", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["lora_reach"]
    assert (found["target_modules"], found["layers"], found["of_layers"]) == (["q_proj", "v_proj"], 1, 4)
    assert check_model.main([folder, "--target-modules", "query"]) == 1
    assert "it cannot be trained: lora.target_modules: the model has no query" in capsys.readouterr().err


def test_nothing_of_libraries_is_printed(model: Path) -> None:
    command = [sys.executable, "-m", "spard.commands", "check-model", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert [line.partition(":")[0] for line in done.stdout.splitlines()[1:3]] == ["LoRA default", "chat template"]


def test_a_loss_without_a_gradient_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for each in (LlamaForCausalLM, LlamaModel):
        monkeypatch.setattr(each, "forward", torch.no_grad()(each.forward))
    assert check_model.main([str(model)]) == 1
    assert "it cannot be trained: " in capsys.readouterr().err
