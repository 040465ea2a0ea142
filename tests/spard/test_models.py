from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import RwkvConfig, RwkvForCausalLM

from spard.data.chat import PLAIN_TEMPLATE
from spard.digests import folder_digest
from spard.errors import InvalidModel
from spard.models import base as base_models
from spard.models.base import load_base, read_base


@pytest.fixture
def copied(model_folder: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder(), tmp_path / "model"))


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: lost")])
def test_a_model_is_not_at_fault_where_its_gpu_is(
    model_folder: Callable[..., Path], error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*given: object) -> None:
        raise error

    monkeypatch.setattr(base_models, "_load", breaks)
    with pytest.raises(RuntimeError, match="CUDA"):
        load_base(model_folder(), device="cpu", quantization="nf4")


def test_a_folder_loads_in_float32_on_the_cpu(copied: Path) -> None:
    base = load_base(copied, device="cpu")

    assert base.model.dtype == torch.float32
    assert not base.model.training
    assert base.hidden_size == 32


def test_loading_leaves_the_global_generator_alone(copied: Path) -> None:
    before = torch.get_rng_state()
    load_base(copied, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_with_code_of_its_own_is_refused(copied: Path) -> None:
    edit(copied / "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"})
    with pytest.raises(InvalidModel, match="auto_map"):
        load_base(copied)


def test_a_tokenizer_with_code_of_its_own_is_refused(copied: Path) -> None:
    edit(copied / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]})
    with pytest.raises(InvalidModel, match="auto_map"):
        load_base(copied)


def test_pickled_weights_are_not_loaded(copied: Path) -> None:
    torch.save(load_file(copied / "model.safetensors"), copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    with pytest.raises(InvalidModel, match="cannot be loaded"):
        load_base(copied)


def test_missing_weights_are_not_made_up(copied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidModel, match=r"lack model\.norm\.weight"):
        load_base(copied)


def test_a_model_that_takes_no_notice_of_its_cache_is_refused(copied: Path) -> None:
    """It would write each token of a reply from the last one alone."""
    RwkvForCausalLM(RwkvConfig(hidden_size=32, num_hidden_layers=2, vocab_size=262)).save_pretrained(copied)
    with pytest.raises(InvalidModel, match="a RwkvForCausalLM takes no past_key_values"):
        load_base(copied)


def test_a_folder_that_is_no_model_is_named_without_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    with pytest.raises(InvalidModel, match="'empty'") as caught:
        load_base(folder)
    assert str(tmp_path) not in caught.value.message


def test_a_tokenizer_without_a_template_gets_the_plain_one(copied: Path) -> None:
    (copied / "chat_template.jinja").unlink()
    assert load_base(copied).tokenizer.chat_template == PLAIN_TEMPLATE


def test_the_digest_follows_the_bytes_and_not_the_place(copied: Path, tmp_path: Path) -> None:
    twin = Path(shutil.copytree(copied, tmp_path / "twin"))
    assert folder_digest(twin) == folder_digest(copied)

    edit(twin / "config.json", rms_norm_eps=1e-3)
    assert folder_digest(twin) != folder_digest(copied)


def test_rows_are_no_longer_than_the_model_has_positions(copied: Path) -> None:
    base = load_base(copied)
    assert base.sequence_limit(None) == 256
    assert base.sequence_limit(100_000) == 256
    assert base.sequence_limit(64) == 64


@pytest.mark.parametrize(("device", "told"), [("cuda", [False]), ("cpu", [])])
def test_on_a_gpu_attention_makes_no_plan_for_each_shape(
    copied: Path, monkeypatch: pytest.MonkeyPatch, device: str, told: list[bool]
) -> None:
    said = list[bool]()
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", said.append)
    read_base(copied, device=device)
    assert said == told
