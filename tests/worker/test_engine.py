"""The engine in this process: replies of a batch are those of each alone, and only what was signed is loaded."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from peft import PeftModel, peft_model
from peft.tuners.lora import Linear as LoraLinear
from peft.utils import save_and_load
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file

from app.inference.engine_errors import refused
from app.inference.json_depth import Schema
from app.inference.protocol import Ask, Said
from spard.config import Lora, Recipe
from spard.digests import MANIFEST, SIGNATURE, write_manifest
from spard.models.adapters import save_adapter, tensor_digest
from spard.models.base import load_base
from spard.models.generate import generate
from spard.models.lora import WEIGHTS, trainable_model
from spard.release.manifest import sign, verify
from tests.spard.parts import byte_tokenizer, write_model
from worker.engine.batch import Batch
from worker.engine.serve import Engine
from worker.engine.texts import Text

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
QUESTIONS = ["Hello there", "What is two and two?", "x", "A longer question, about nothing in particular at all."]
TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("engine") / "model")


@pytest.fixture(scope="module")
def adapters(model: Path) -> list[Path]:
    return [make(model, model.parent / f"adapter-{seed}", seed) for seed in (1, 2, 3)]


def make(model: Path, folder: Path, seed: int, scale: float = 0.2) -> Path:
    base = load_base(model, device="cpu")
    tuned = trainable_model(base.model, Recipe(lora=Lora(rank=4), seed=seed))
    generator = torch.Generator().manual_seed(seed)
    for name, weights in tuned.named_parameters():
        if "lora_B" in name:
            weights.data = scale * torch.randn(weights.shape, generator=generator)
    save_adapter(tuned, base, "tiny", folder)
    sign(folder, KEY)
    return folder


class Asked:
    """An engine, and what it said."""

    def __init__(self, model: Path, rows: int = 8, adapter_bytes: int = 1 << 30) -> None:
        self.said: list[Said] = []
        self.engine = Engine(load_base(model, device="cpu"), self.said.append, rows, adapter_bytes)
        self.asked = 0

    def load(self, folder: Path, manifest: str | None = None) -> Said:
        line = {"op": "load", "adapter": folder.name, "folder": str(folder)}
        self.engine.take(line | {"manifest_sha256": manifest or verify(folder).manifest_sha256})
        return self.said[-1]

    def ask(self, question: str, adapter: str | None = None, project: str = "p", **more: Any) -> int:
        self.asked += 1
        ask: Ask = {
            "adapter": adapter,
            "messages": [{"role": "user", "content": question}],
            "prompt": None,
            "tools": [],
            "n": 1,
            "max_tokens": TOKENS,
            "temperature": 0.0,
            "top_p": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": None,
            "stop": [],
            "json_schema": None,
            "top_logprobs": None,
            "as_ids": False,
        }
        ask |= cast(Ask, more)
        self.engine.take({"op": "generate", "id": self.asked, "project": project, "ask": ask})
        return self.asked

    def run(self) -> None:
        while self.engine.is_busy:
            self.engine.step()

    def text(self, number: int, index: int = 0) -> str:
        pieces = [each for each in self.said if each["kind"] == "piece" and each["id"] == number]
        return "".join(each["text"] for each in pieces if each["index"] == index)

    def order(self) -> list[int]:
        return [each["id"] for each in self.said if each["kind"] == "started"]


def alone(model: Path, adapter: Path | None, question: str) -> str:
    base = load_base(model, device="cpu")
    tuned = base.model if adapter is None else PeftModel.from_pretrained(base.model, adapter).eval()
    return generate(tuned, base.tokenizer, [question], TOKENS)[0]


def test_rows_that_join_and_leave_say_what_each_says_alone(model: Path, adapters: list[Path]) -> None:
    asked = Asked(model)
    for folder in adapters:
        assert asked.load(folder)["kind"] == "loaded"
    expected = {}
    for question in QUESTIONS:
        for adapter in (None, *adapters):
            number = asked.ask(question, adapter.name if adapter else None)
            expected[number] = alone(model, adapter, question)
            asked.engine.step()
    asked.run()
    assert {number: asked.text(number).strip() for number in expected} == expected


def test_one_after_the_other_each_has_its_own_adapter(model: Path, adapters: list[Path]) -> None:
    asked = Asked(model)
    for folder in adapters[:2]:
        asked.load(folder)
    for adapter in (adapters[1], None, adapters[0], None, adapters[1]):
        number = asked.ask(QUESTIONS[0], adapter.name if adapter else None)
        asked.run()
        assert asked.text(number).strip() == alone(model, adapter, QUESTIONS[0])


def test_on_another_device_the_same_is_said(model: Path, adapters: list[Path]) -> None:
    command = [sys.executable, "-m", "tests.worker.engine_on_fake_device", str(model), *map(str, adapters)]
    told = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    found = json.loads(told.splitlines()[-1])
    asked = [(question, adapter) for question in QUESTIONS for adapter in (None, *adapters)]
    assert found == {
        "kinds": ["loaded"] * len(adapters),
        "texts": [alone(model, adapter, question) for question, adapter in asked],
        "has_all": True,
        "device": "fake:0",
    }


def test_an_adapter_is_read_onto_the_engine_s_own_device(
    model: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT reads it onto any GPU of the machine unless it is told where: one that another process may have."""
    asked, places = Asked(model), list[str]()
    read = save_and_load.safe_load_file  # type: ignore[attr-defined]

    def noted(path: str, device: str) -> dict[str, torch.Tensor]:
        places.append(device)
        found: dict[str, torch.Tensor] = read(path)
        return found

    monkeypatch.setattr(peft_model, "infer_device", lambda: "cuda")
    monkeypatch.setattr(save_and_load, "safe_load_file", noted)
    for folder in adapters[:2]:
        assert asked.load(folder)["kind"] == "loaded"
    assert places == ["cpu", "cpu"]


def test_a_row_with_a_schema_leaves_the_others_as_they_are(model: Path, adapters: list[Path]) -> None:
    asked = Asked(model)
    asked.load(adapters[0])
    items = {"type": "array", "items": {"type": "integer", "minimum": 10, "maximum": 99}, "minItems": 2, "maxItems": 3}
    free = asked.ask(QUESTIONS[1], adapters[0].name)
    held = asked.ask(QUESTIONS[1], adapters[0].name, json_schema=items)
    asked.run()
    assert asked.text(free).strip() == alone(model, adapters[0], QUESTIONS[1])
    found = json.loads(asked.text(held))
    assert len(found) in (2, 3)
    assert all(10 <= each <= 99 for each in found)


def test_a_schema_of_as_many_references_as_are_taken_does_not_end_the_engine(model: Path) -> None:
    links: dict[str, Any] = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}, "type": "array"} for i in range(480)}
    schema = {"$defs": links | {"d480": {"type": "string"}}, "$ref": "#/$defs/d0"}
    TypeAdapter(Schema).validate_python(schema)
    asked = Asked(model)
    held = asked.ask(QUESTIONS[0], json_schema=schema)
    asked.run()
    assert asked.text(held).startswith("[")


def test_an_engine_without_the_library_refuses_a_schema(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    asked = Asked(model)
    asked.ask(QUESTIONS[0], json_schema={"type": "object"})
    asked.run()
    assert (asked.said[-1]["kind"], asked.said[-1]["code"]) == ("failed", "unsupported_parameter")


def test_one_that_is_cancelled_leaves_the_others_as_they_are(model: Path) -> None:
    asked = Asked(model)
    first, second = asked.ask(QUESTIONS[0]), asked.ask(QUESTIONS[3])
    for _ in range(3):
        asked.engine.step()
    asked.engine.take({"op": "cancel", "id": first})
    asked.run()
    assert asked.text(second).strip() == alone(model, None, QUESTIONS[3])
    assert all(each["id"] != first for each in asked.said if each["kind"] == "done")


def test_a_start_is_told_before_the_prompt_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked checks meanwhile whether the model is released."""
    asked, told = Asked(model), list[list[str]]()
    read = asked.engine._batch.join

    def noted(ids: Sequence[int], name: str, count: int) -> None:
        told.append([each["kind"] for each in asked.said])
        read(ids, name, count)

    monkeypatch.setattr(asked.engine._batch, "join", noted)
    asked.ask(QUESTIONS[0])
    asked.run()
    assert told == [["ready", "started"]]


def test_a_gpu_that_is_full_ends_the_replies_and_not_the_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(model)
    ended = [asked.ask(question) for question in QUESTIONS[:2]]
    asked.engine.step()
    with monkeypatch.context() as patch:

        def full(*given: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        patch.setattr(Batch, "join", full)
        asked.engine.step()
    told = [each for each in asked.said if each["kind"] == "failed"]
    assert [(each["id"], each["code"]) for each in told] == [(number, "engine_busy") for number in ended]
    assert refused(told[0]).status == 429
    after = asked.ask(QUESTIONS[2])
    asked.run()
    assert asked.text(after).strip() == alone(model, None, QUESTIONS[2])


@pytest.mark.parametrize(
    "asked_for", [{}, {"n": 2}, {"temperature": 1.0, "seed": 5}, {"top_logprobs": 2, "json_schema": {}}]
)
def test_an_adapter_whose_logits_are_no_numbers_ends_its_own_requests(
    model: Path, adapters: list[Path], asked_for: dict[str, Any]
) -> None:
    asked = Asked(model)
    for folder in adapters[:2]:
        asked.load(folder)
    sound = [asked.ask(QUESTIONS[1]), asked.ask(QUESTIONS[2], adapters[0].name)]
    broken = asked.ask(QUESTIONS[0], adapters[1].name, **asked_for)
    for _ in range(5):
        asked.engine.step()
    for name, weights in asked.engine._base.model.named_parameters():
        if f"lora_B.a{adapters[1].name}" in name:
            weights.data.fill_(float("nan"))
    begun = asked.ask(QUESTIONS[3], adapters[1].name, **asked_for)
    asked.run()
    told = [each for each in asked.said if each["kind"] == "failed"]
    assert sorted((each["id"], each["code"]) for each in told) == [(broken, "reply_failed"), (begun, "reply_failed")]
    assert (refused(told[0]).status, refused(told[0]).code) == (400, "reply_failed")
    assert sorted(each["id"] for each in asked.said if each["kind"] == "done") == sound
    assert asked.text(sound[0]).strip() == alone(model, None, QUESTIONS[1])
    assert asked.text(sound[1]).strip() == alone(model, adapters[0], QUESTIONS[2])
    assert not asked.engine._done


def test_projects_take_turns(model: Path) -> None:
    asked = Asked(model, rows=1)
    many = [asked.ask(QUESTIONS[1], project="many", max_tokens=1) for _ in range(3)]
    one = asked.ask(QUESTIONS[1], project="one", max_tokens=1)
    asked.run()
    assert asked.order() == [many[0], one, many[1], many[2]]


def test_the_adapters_used_least_make_room(model: Path, adapters: list[Path]) -> None:
    room = 2 * max((folder / WEIGHTS).stat().st_size for folder in adapters)
    asked = Asked(model, adapter_bytes=room)
    for folder in adapters:
        assert asked.load(folder)["kind"] == "loaded"
    numbers = [asked.ask(QUESTIONS[0], folder.name) for folder in adapters]
    asked.run()
    assert [each["id"] for each in asked.said if each["kind"] == "absent"] == numbers[:1]
    assert asked.text(numbers[2]).strip() == alone(model, adapters[2], QUESTIONS[0])


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

    def mixed(self: Any, *args: Any, adapter_names: Any = None, **more: Any) -> Any:
        names = (
            adapter_names
            if adapter_names is None or len(adapter_names) < 3
            else [*adapter_names[:-1], adapter_names[1]]
        )
        return forward(self, *args, adapter_names=names, **more)

    monkeypatch.setattr(type(asked.engine._adapters.model), "forward", mixed)
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

    def broken(*given: Any, **more: Any) -> None:
        read(*given, **more)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(peft_model, "set_peft_model_state_dict", broken)


def broken_injection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layers have gotten theirs when there is no memory for the next."""
    update, done = LoraLinear.update_layer, list[str]()

    def broken(self: Any, *given: Any, **more: Any) -> None:
        done.append("")
        if len(done) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        update(self, *given, **more)

    monkeypatch.setattr(LoraLinear, "update_layer", broken)


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


def test_seeds_penalties_and_probabilities(model: Path) -> None:
    asked = Asked(model)
    same = [asked.ask(QUESTIONS[0], temperature=1.0, seed=5) for _ in range(2)]
    two = asked.ask(QUESTIONS[0], temperature=1.5, n=2, seed=5, top_p=0.9)
    often = asked.ask(QUESTIONS[1], presence_penalty=2.0, frequency_penalty=2.0)
    told = asked.ask(QUESTIONS[0], top_logprobs=2)
    asked.run()
    assert asked.text(same[0]) == asked.text(same[1])
    assert asked.text(two, 0) != asked.text(two, 1)
    assert asked.text(often) != alone(model, None, QUESTIONS[1])
    tokens = [
        token for each in asked.said if each["kind"] == "piece" and each["id"] == told for token in each["tokens"]
    ]
    assert tokens
    for token in tokens:  # greedy: each is the likeliest
        assert token["top_logprobs"][0]["token"] == token["token"]
        assert 0 >= token["logprob"] >= token["top_logprobs"][1]["logprob"]


def test_no_half_of_a_character_is_shown_and_nothing_from_a_stop_on() -> None:
    tokenizer = byte_tokenizer()
    (ids,) = tokenizer(["Größe: 5 € STOP and more"], add_special_tokens=False)["input_ids"]
    text = Text(tokenizer, ["STOP", "never"])
    shown = [text.add(token) for token in ids]
    assert "".join(shown) + text.end() == "Größe: 5 € "
    assert text.is_stopped
    assert not any("\ufffd" in each for each in shown)
    rest = Text(tokenizer, ["STOP"])
    assert "".join(rest.add(token) for token in ids[:16]) + rest.end() == tokenizer.decode(ids[:16])


def test_what_may_begin_a_stop_is_held_back() -> None:
    draw = random.Random(7)
    for _ in range(200):
        stops = ["".join(draw.choices("ab", k=draw.randint(1, 6))) for _ in range(3)]
        written, text, shown = "".join(draw.choices("abc", k=30)), Text(byte_tokenizer(), stops), ""
        for at, token in enumerate(byte_tokenizer()(written, add_special_tokens=False)["input_ids"], 1):
            shown += text.add(token)
            if text.is_stopped:
                break
            held = max((n for stop in stops for n in range(len(stop)) if written[:at].endswith(stop[:n])), default=0)
            assert shown == written[: at - held]
        ends = [end for stop in stops if (end := written[:at].find(stop)) >= 0]
        assert shown + text.end() == written[: min(ends, default=len(written))]
