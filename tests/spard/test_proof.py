"""An adapter is released only when others can load it and see what we saw."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spard.config import Lora, NoDefense, Recipe, resolve
from spard.errors import AdapterNotProved, Stopped
from spard.models.adapters import CONFIG_KEYS, save_adapter
from spard.models.base import Base
from spard.release import clean_load
from spard.release.proof import CleanProcess, Proof, Source, prove
from spard.training.train import train
from tests.spard.parts import sums

PROMPTS = ["Add 1 and 2.", "Add 3 and 4."]
Check = Callable[..., Proof]


@pytest.fixture
def clean() -> Iterator[CleanProcess]:
    with CleanProcess() as process:
        yield process


def train_model(base: Base, lora: Lora | None) -> Any:
    recipe = Recipe(defense=NoDefense(), lora=lora, learning_rate=1e-2)
    return train(base, sums(base), [], recipe, resolve(recipe, 24, 32)).model


@pytest.fixture
def check(clean: CleanProcess, base: Base, model_folder: Callable[..., Path]) -> Check:
    source = Source(str(model_folder()), None)
    return lambda model, folder: prove(clean, model, base, source, folder, PROMPTS, lambda: None)


@pytest.fixture
def saved_model(base: Base, tmp_path: Path) -> tuple[Any, Path]:
    """A trained model and its folder."""
    model = train_model(base, Lora(rank=4, alpha=8.0))
    save_adapter(model, base, "tiny", tmp_path / "adapter")
    return model, tmp_path / "adapter"


def test_a_good_adapter_is_proved(saved_model: tuple[Any, Path], check: Check) -> None:
    proof = check(*saved_model)
    assert proof.max_difference <= 1e-4
    assert proof.difference_to_base > 1e-2
    assert proof.prompts == 2


def test_a_whole_model_is_proved(base: Base, tmp_path: Path, check: Check) -> None:
    model = train_model(base, None)
    save_adapter(model, base, "tiny", tmp_path / "model")
    assert check(model, tmp_path / "model").max_difference <= 1e-4


def test_other_weights_are_found_out(saved_model: tuple[Any, Path], check: Check) -> None:
    path = saved_model[1] / "adapter_model.safetensors"
    save_file({name: tensor * 1.01 for name, tensor in load_file(path).items()}, path)
    with pytest.raises(AdapterNotProved, match="logits differ"):
        check(*saved_model)


def test_an_adapter_that_changes_nothing_is_found_out(saved_model: tuple[Any, Path], check: Check) -> None:
    model, folder = saved_model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    path = folder / "adapter_model.safetensors"
    save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(path).items()}, path)
    with pytest.raises(AdapterNotProved, match="changes nothing") as refused:
        check(model, folder)
    assert refused.value.message.count("could not be proved") == 1


def test_another_chat_template_is_found_out(saved_model: tuple[Any, Path], check: Check) -> None:
    path = saved_model[1] / "chat_template.jinja"
    path.write_text(path.read_text().replace("\n", " "))
    with pytest.raises(AdapterNotProved, match="chat template"):
        check(*saved_model)


def test_what_cannot_be_loaded_is_told_without_its_place(saved_model: tuple[Any, Path], check: Check) -> None:
    (saved_model[1] / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterNotProved, match="cannot load it") as error:
        check(*saved_model)
    assert str(saved_model[1]) not in error.value.message


def test_whoever_stops_us_is_obeyed_while_we_wait(
    saved_model: tuple[Any, Path], clean: CleanProcess, base: Base, model_folder: Callable[..., Path]
) -> None:
    def stop() -> None:
        raise Stopped("the worker stops")

    with pytest.raises(Stopped):
        prove(clean, saved_model[0], base, Source(str(model_folder()), None), saved_model[1], PROMPTS, stop)


def test_the_clean_process_imports_nothing_of_ours() -> None:
    source = Path(clean_load.__file__).read_text()
    imports = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert not [line for line in imports if "spard" in line]
    assert len(imports) >= 8


def test_the_config_has_the_keys_that_old_releases_know(saved_model: tuple[Any, Path]) -> None:
    assert tuple(json.loads((saved_model[1] / "adapter_config.json").read_text())) == CONFIG_KEYS


def test_one_process_sees_several_adapters_and_another_one_goes_on_after_a_failure(
    saved_model: tuple[Any, Path], check: Check, clean: CleanProcess
) -> None:
    first, again = check(*saved_model), check(*saved_model)
    assert first == again
    weights = saved_model[1] / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(b"")
    with pytest.raises(AdapterNotProved, match="cannot load it"):
        check(*saved_model)
    weights.write_bytes(content)
    assert check(*saved_model) == first


def test_the_trained_model_stays_where_it_was(saved_model: tuple[Any, Path], check: Check) -> None:
    before = {name: (each.device, each.clone()) for name, each in saved_model[0].named_parameters()}
    check(*saved_model)
    for name, each in saved_model[0].named_parameters():
        assert each.device == before[name][0]
        assert torch.equal(each, before[name][1])


def test_the_clean_process_waits_for_no_library_that_an_adapter_of_a_plain_model_does_not_need() -> None:
    """PEFT must find bitsandbytes again for a base model in NF4, and puts its own layers over it then."""
    code = f"""
import runpy, sys
runpy.run_path({clean_load.__file__!r}, run_name="clean_load")
assert not [name for name in ("bitsandbytes", "boto3", "scipy", "sklearn") if name in sys.modules]
from importlib.util import find_spec
from peft.import_utils import is_bnb_available
is_bnb_available.cache_clear()
print(is_bnb_available() == (find_spec("bitsandbytes") is not None))
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr
