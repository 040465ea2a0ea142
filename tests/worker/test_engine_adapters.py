"""An engine's adapters: only what was signed is loaded, each is proved, and the least used ones make room."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, peft_model
from peft.tuners.lora import Linear as LoraLinear
from peft.utils import save_and_load
from safetensors.torch import load_file, save_file

from spard.digests import MANIFEST, SIGNATURE, write_manifest
from spard.models.adapters import tensor_digest
from spard.models.lora import WEIGHTS
from spard.release.manifest import sign, verify
from tests.worker.engine_in_process import KEY, QUESTIONS, Asked, alone, make


def test_an_adapter_is_read_onto_the_engine_s_own_device(
    model: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT reads it onto any GPU of the machine unless it is told where: one that another process may have."""
    asked, places = Asked(model), list[str]()
    read = save_and_load.safe_load_file  # type: ignore[attr-defined]

    def read_and_note(path: str, device: str) -> dict[str, torch.Tensor]:
        places.append(device)
        found: dict[str, torch.Tensor] = read(path)
        return found

    monkeypatch.setattr(peft_model, "infer_device", lambda: "cuda")
    monkeypatch.setattr(save_and_load, "safe_load_file", read_and_note)
    for folder in adapters[:2]:
        assert asked.load(folder)["kind"] == "loaded"
    assert places == ["cpu", "cpu"]


def test_the_adapters_used_least_make_room(model: Path, adapters: list[Path]) -> None:
    room = 2 * max((folder / WEIGHTS).stat().st_size for folder in adapters)
    asked = Asked(model, adapter_bytes=room)
    for folder in adapters:
        assert asked.load(folder)["kind"] == "loaded"
        asked.ask(QUESTIONS[0], folder.name)
        asked.run()
    numbers = [asked.ask(QUESTIONS[0], folder.name) for folder in adapters]
    asked.run()
    assert [each["id"] for each in asked.said if each["kind"] == "absent"] == numbers[:1]
    assert asked.text(numbers[2]).strip() == alone(model, adapters[2], QUESTIONS[0])


def test_adapters_are_kept_for_the_requests_that_they_were_loaded_for(model: Path, adapters: list[Path]) -> None:
    """Else requests for more adapters than there is room for drop each other's, and none is ever answered."""
    asked = Asked(model, adapter_bytes=1)
    for folder in adapters:
        assert asked.load(folder)["kind"] == "loaded"
    numbers = [asked.ask(QUESTIONS[0], folder.name) for folder in adapters]
    asked.run()
    assert [asked.text(each).strip() for each in numbers] == [alone(model, each, QUESTIONS[0]) for each in adapters]


def test_an_adapter_is_not_kept_for_a_request_that_never_comes(
    model: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, now = Asked(model, adapter_bytes=1), [100.0]
    monkeypatch.setattr(asked.engine._adapters, "_clock", lambda: now[0])
    assert asked.load(adapters[0])["kind"] == "loaded"
    now[0] += 10
    assert asked.load(adapters[1])["kind"] == "loaded"
    asked.ask(QUESTIONS[0], adapters[0].name)
    asked.run()
    assert asked.said[-1]["kind"] == "absent"


def test_an_adapter_that_is_not_loaded_is_not_answered_for_by_the_base_model(model: Path) -> None:
    asked = Asked(model)
    asked.ask(QUESTIONS[0], "unknown")
    asked.run()
    assert [each["kind"] for each in asked.said] == ["ready", "absent"]


def changed_weights(folder: Path) -> None:
    tensors = {name: each * 2 for name, each in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def signed_with_another_digest(folder: Path) -> None:
    """Weights and manifest agree, but for the digest of the tensors."""
    facts = verify(folder).manifest
    changed_weights(folder)
    write_manifest(folder, facts | {"tensor_digest": "sha256:0"})
    sign(folder, KEY)


def signed_for_another_base(folder: Path) -> None:
    facts = verify(folder).manifest
    write_manifest(folder, facts | {"base_source": {"digest": "sha256:0"}})
    sign(folder, KEY)


def without_signature(folder: Path) -> None:
    (folder / SIGNATURE).unlink()


def with_another_file(folder: Path) -> None:
    (folder / "more.safetensors").write_bytes(b"")


@pytest.mark.parametrize(
    "harm",
    [changed_weights, signed_with_another_digest, signed_for_another_base, without_signature, with_another_file],
)
def test_what_was_not_signed_so_is_not_loaded(model: Path, adapters: list[Path], tmp_path: Path, harm: Any) -> None:
    folder = tmp_path / "harmed"
    shutil.copytree(adapters[0], folder)
    harm(folder)
    asked = Asked(model)
    manifest = verify(folder).manifest_sha256 if harm.__name__.startswith("signed") else "0"
    assert asked.load(folder, manifest)["kind"] == "refused"
    asked.ask(QUESTIONS[0], "harmed")
    asked.run()
    assert asked.said[-1]["kind"] == "absent"


def test_another_signed_adapter_in_its_place_is_not_loaded(model: Path, adapters: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "swapped"
    shutil.copytree(adapters[1], folder)
    said = Asked(model).load(folder, verify(adapters[0]).manifest_sha256)
    assert (said["kind"], "another adapter" in said["message"]) == ("refused", True)


def test_one_that_changes_nothing_fails_the_probe(model: Path, tmp_path: Path) -> None:
    said = Asked(model).load(make(model, tmp_path / "nothing", 1, scale=0.0))
    assert (said["kind"], "changes nothing" in said["message"]) == ("refused", True)


def test_an_engine_that_answers_with_another_adapter_fails_the_probe(
    model: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As engines have done that load adapters while they answer: the last row gets the weights of the one before."""
    asked = Asked(model)
    asked.load(adapters[0])
    forward = PeftModel.forward

    def mix_adapters(self: Any, *args: Any, adapter_names: Any = None, **more: Any) -> Any:
        names = (
            adapter_names
            if adapter_names is None or len(adapter_names) < 3
            else [*adapter_names[:-1], adapter_names[1]]
        )
        return forward(self, *args, adapter_names=names, **more)

    monkeypatch.setattr(type(asked.engine._adapters.model), "forward", mix_adapters)
    said = asked.load(adapters[1])
    assert (said["kind"], "away from the signed" in said["message"]) == ("refused", True)


def test_an_engine_that_holds_other_weights_fails_the_probe(
    model: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(model)
    asked.load(adapters[0])
    load = PeftModel.load_adapter
    monkeypatch.setattr(PeftModel, "load_adapter", lambda self, path, **more: load(self, str(adapters[2]), **more))
    said = asked.load(adapters[1])
    assert (said["kind"], "other weights" in said["message"]) == ("refused", True)


def broken_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights go into the model, and then there is no memory for more."""
    read = save_and_load.set_peft_model_state_dict

    def read_and_fail(*given: Any, **more: Any) -> None:
        read(*given, **more)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(peft_model, "set_peft_model_state_dict", read_and_fail)


def broken_injection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layers have the adapter's weights when memory runs out."""
    update, done = LoraLinear.update_layer, list[str]()

    def inject_and_fail(self: Any, *given: Any, **more: Any) -> None:
        done.append("")
        if len(done) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        update(self, *given, **more)

    monkeypatch.setattr(LoraLinear, "update_layer", inject_and_fail)


@pytest.mark.parametrize("held", [0, 1])
@pytest.mark.parametrize("harm", [broken_read, broken_injection])
def test_a_load_that_fails_half_way_leaves_nothing_behind(
    model: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch, held: int, harm: Any
) -> None:
    asked = Asked(model)
    for folder in adapters[:held]:
        asked.load(folder)
    with monkeypatch.context() as patch:
        harm(patch)
        said = asked.load(adapters[2])
    assert (said["kind"], "out of memory" in said["message"]) == ("refused", True)
    names = [name for name, _ in asked.engine._base.model.named_parameters() if f"a{adapters[2].name[:24]}" in name]
    assert names == []
    for adapter in (None, *adapters[:held]):
        number = asked.ask(QUESTIONS[0], adapter.name if adapter else None)
        asked.run()
        assert asked.text(number).strip() == alone(model, adapter, QUESTIONS[0])
    assert asked.load(adapters[2])["kind"] == "loaded"
    numbers = [asked.ask(QUESTIONS[0], each.name) for each in (*adapters[:held], adapters[2])]
    asked.run()
    for number, adapter in zip(numbers, (*adapters[:held], adapters[2]), strict=True):
        assert asked.text(number).strip() == alone(model, adapter, QUESTIONS[0])


def test_the_manifest_names_the_tensors(adapters: list[Path]) -> None:
    for folder in adapters:
        assert verify(folder).manifest["tensor_digest"] == tensor_digest(load_file(folder / WEIGHTS))
        assert (folder / MANIFEST).exists()
