"""Base models that are stored in FP8 or MXFP4, or bring penalties for decoding, are exported as they were audited."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from spard.config import Lora
from spard.errors import AdapterNotProved, InvalidRecipe
from spard.models import adapters
from spard.models.adapters import save_adapter, save_full, save_merged
from spard.models.base import load_base
from spard.models.peft import PeftModel
from spard.pipeline import stages
from spard.pipeline.library import run
from tests.spard.base_folders import KINDS, Kind, change, write_kind
from tests.spard.test_adapters import PUBLIC, same_weights, train_model
from tests.spard.test_run import write_run

STORED = [kind for kind in KINDS if "stored in" in kind.note]


@pytest.fixture
def make_adapter(tmp_path: Path) -> Callable[[Path], Path]:
    """An adapter on the base model of a folder."""

    def adapter(folder: Path) -> Path:
        base = load_base(folder, device="cpu")
        save_adapter(train_model(base, Lora(rank=4)), base, PUBLIC, tmp_path / "adapter")
        return tmp_path / "adapter"

    return adapter


@pytest.mark.parametrize("kind", STORED, ids=lambda kind: kind.name)
def test_a_merged_model_of_stored_weights_loads_with_all_of_them(
    kind: Kind, make_adapter: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = write_kind(kind, tmp_path)
    adapter = make_adapter(folder)
    assert "(dequantize=True)" in (adapter / "README.md").read_text()
    save_merged(load_base(folder, device="cpu", as_stored=True), adapter, tmp_path / "whole")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", output_loading_info=True)
    found, info = loaded
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    base = load_base(folder, device="cpu", as_stored=True).model
    names = [name for name, _ in base.named_parameters() if "proj" not in name or "experts" in name]
    for name in names:
        assert torch.equal(found.get_parameter(name), base.get_parameter(name).to(found.get_parameter(name).dtype)), (
            name
        )


@pytest.mark.parametrize("kind", STORED, ids=lambda kind: kind.name)
def test_a_model_merged_and_saved_as_the_card_says_loads_with_all_of_its_weights(
    kind: Kind, make_adapter: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = write_kind(kind, tmp_path)
    adapter = make_adapter(folder)
    card = (adapter / "README.md").read_text()
    config = re.findall(r"quantization_config=transformers\.(\w+)\(dequantize=True\)", card)[0]
    settings = dict.fromkeys(re.findall(r"save_pretrained\(\.\.\., (\w+)=False\)", card), False)
    options = {"quantization_config": getattr(transformers, config)(dequantize=True), "dtype": torch.bfloat16}
    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, **options), adapter)
    merged_model = model.merge_and_unload()
    merged_model.save_pretrained(tmp_path / "whole", **settings)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.bfloat16)
    assert same_weights(loaded, merged_model)


@pytest.mark.parametrize("kind", STORED, ids=lambda kind: kind.name)
def test_the_weights_have_one_type(kind: Kind, tmp_path: Path) -> None:
    folder = write_kind(kind, tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        assert {each.dtype for each in load_base(folder, device="cpu", dtype=dtype).model.parameters()} == {dtype}


def test_what_was_written_is_read_back_before_it_is_there(
    make_adapter: Callable[[Path], Path],
    model_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter, plain = make_adapter(model_folder()), save_full

    def losing(model: object, name: str, folder: Path, **more: object) -> None:
        plain(model, name, folder, **more)  # type: ignore[arg-type]  # as they came
        change(folder / "config.json", rope_theta=7.0, rope_parameters={"rope_theta": 7.0, "rope_type": "default"})

    monkeypatch.setattr(adapters, "save_full", losing)
    with pytest.raises(AdapterNotProved, match="read back from its files"):
        save_merged(load_base(model_folder(), device="cpu"), adapter, tmp_path / "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_full_fine_tuning_of_stored_weights_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "prepare", lambda context: pytest.fail("rows were read"))
    spec = write_run(write_kind(STORED[0], tmp_path), tmp_path)
    spec = replace(spec, recipe=replace(spec.recipe, lora=None))
    with pytest.raises(InvalidRecipe, match="its own weights cannot be trained"):
        run(spec, tmp_path / "out", lambda message: None)


def test_penalties_are_told_in_the_card_and_left_out_of_a_merged_model(
    make_adapter: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = write_kind(KINDS[0], tmp_path)
    sampling = {"do_sample": False, "temperature": 0.7}  # transformers loads these together and refuses to save them
    change(folder / "generation_config.json", repetition_penalty=1.05, no_repeat_ngram_size=3, **sampling)
    adapter = make_adapter(folder)
    card = (adapter / "README.md").read_text()
    assert "--generation-config vllm" in card
    assert "repetition_penalty, no_repeat_ngram_size" in card
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_merged(load_base(folder, device="cpu"), adapter, tmp_path / "whole")
    written_down = json.loads((tmp_path / "whole" / "generation_config.json").read_text())
    assert written_down["eos_token_id"] == 256
    assert not {"repetition_penalty", "no_repeat_ngram_size"} & set(written_down)


def test_a_card_of_a_base_without_penalties_names_no_option(
    make_adapter: Callable[[Path], Path], model_folder: Callable[..., Path]
) -> None:
    assert "--generation-config" not in (make_adapter(model_folder()) / "README.md").read_text()
