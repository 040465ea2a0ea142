"""A base model is tried before jobs depend on it: whatever is wrong with it is one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, LlamaModel

from spard.commands import check_model


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


def cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def with_other_layers(folder: Path) -> None:
    """The layers have other names than the default recipe trains."""
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 300}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(folder)


FAULTS: dict[Callable[[Path], None], str] = {
    without_tokenizer: "tokenizer",
    without_end_token: "end-of-text token",
    bad_template: "chat template",
    silent_template: "chat template",
    not_finite: "not finite",
    cut_off: "cannot be loaded",
    with_other_layers: "it cannot be trained: lora.target_modules: the model has no",
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
    assert "a forward pass" in capsys.readouterr().out


def test_a_loss_without_a_gradient_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for each in (LlamaForCausalLM, LlamaModel):
        monkeypatch.setattr(each, "forward", torch.no_grad()(each.forward))
    assert check_model.main([str(model)]) == 1
    assert "it cannot be trained: " in capsys.readouterr().err
