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
def model_copy(model_folder: Callable[..., Path], tmp_path: Path) -> Path:
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


def test_a_folder_loads_in_float32_on_the_cpu(model_copy: Path) -> None:
    base = load_base(model_copy, device="cpu")

    assert base.model.dtype == torch.float32
    assert not base.model.training
    assert base.hidden_size == 32


def test_loading_leaves_the_global_generator_alone(model_copy: Path) -> None:
    before = torch.get_rng_state()
    load_base(model_copy, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_with_code_of_its_own_is_refused(model_copy: Path) -> None:
    edit(model_copy / "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"})
    with pytest.raises(InvalidModel, match="auto_map"):
        load_base(model_copy)


def test_a_tokenizer_with_code_of_its_own_is_refused(model_copy: Path) -> None:
    edit(model_copy / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]})
    with pytest.raises(InvalidModel, match="auto_map"):
        load_base(model_copy)


def test_pickled_weights_are_not_loaded(model_copy: Path) -> None:
    torch.save(load_file(model_copy / "model.safetensors"), model_copy / "pytorch_model.bin")
    (model_copy / "model.safetensors").unlink()
    with pytest.raises(InvalidModel, match="cannot be loaded"):
        load_base(model_copy)


def test_missing_weights_are_not_made_up(model_copy: Path) -> None:
    tensors = load_file(model_copy / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, model_copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidModel, match=r"lack model\.norm\.weight"):
        load_base(model_copy)


def test_a_model_that_takes_no_notice_of_its_cache_is_refused(model_copy: Path) -> None:
    """It would write each token of a reply from the last one alone."""
    RwkvForCausalLM(RwkvConfig(hidden_size=32, num_hidden_layers=2, vocab_size=262)).save_pretrained(model_copy)
    with pytest.raises(InvalidModel, match="a RwkvForCausalLM takes no past_key_values"):
        load_base(model_copy)


def test_a_folder_that_is_no_model_is_named_without_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    with pytest.raises(InvalidModel, match="'empty'") as caught:
        load_base(folder)
    assert str(tmp_path) not in caught.value.message


def test_a_tokenizer_without_a_template_gets_the_plain_one(model_copy: Path) -> None:
    (model_copy / "chat_template.jinja").unlink()
    assert load_base(model_copy).tokenizer.chat_template == PLAIN_TEMPLATE


def test_the_digest_follows_the_bytes_and_not_the_place(model_copy: Path, tmp_path: Path) -> None:
    twin = Path(shutil.copytree(model_copy, tmp_path / "twin"))
    assert folder_digest(twin) == folder_digest(model_copy)

    edit(twin / "config.json", rms_norm_eps=1e-3)
    assert folder_digest(twin) != folder_digest(model_copy)


def test_rows_are_no_longer_than_the_model_has_positions(model_copy: Path) -> None:
    base = load_base(model_copy)
    assert base.sequence_limit(None) == 256
    assert base.sequence_limit(100_000) == 256
    assert base.sequence_limit(64) == 64


@pytest.mark.parametrize(("device", "told"), [("cuda", [False]), ("cpu", [])])
def test_on_a_gpu_attention_makes_no_plan_for_each_shape(
    model_copy: Path, monkeypatch: pytest.MonkeyPatch, device: str, told: list[bool]
) -> None:
    said = list[bool]()
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", said.append)
    read_base(model_copy, device=device)
    assert said == told
