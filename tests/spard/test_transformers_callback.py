from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from spard.config import Spard
from spard.data.chat import encode_all
from spard.errors import InvalidData, InvalidRecipe
from spard.integrations.transformers import SpardCallback
from spard.losses.cross_entropy import evaluate
from spard.models.base import Base
from spard.training.resume_state import load as load_state
from spard.training.resume_state import save as save_state
from tests.spard.parts import chat, refusals, sums

EXAMPLES = [chat(f"Do harm number {i}{'!' * i}", f"I cannot help with {i}.") for i in range(7)]


class Rows(Dataset[dict[str, Any]]):
    """The training rows, padded to one length."""

    def __init__(self, base: Base) -> None:
        self.rows, self.pad = sums(base, 16), base.tokenizer.pad_token_id

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        row, width = self.rows[i], max(len(each.ids) for each in self.rows)
        missing = width - len(row.ids)
        return {
            "input_ids": [*row.ids, *[self.pad] * missing],
            "attention_mask": [1] * len(row.ids) + [0] * missing,
            "labels": [*row.labels, *[-100] * missing],
        }


def trainer(base: Base, folder: Path, callback: SpardCallback | None, *, lora: bool = False, **more: Any) -> Trainer:
    asked: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 3,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
        "dataloader_pin_memory": False,
    }
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    model = get_peft_model(base.model, config) if lora else base.model
    return Trainer(
        model=model,
        args=TrainingArguments(**(asked | more)),
        train_dataset=Rows(base),
        processing_class=base.tokenizer,
        callbacks=[callback] if callback else [],
    )


def weights(base: Base) -> list[torch.Tensor]:
    return [part.detach().clone() for part in base.model.parameters()]


@pytest.mark.parametrize("lora", [False, True])
def test_the_trainer_holds_the_safe_loss(load: Callable[..., Base], tmp_path: Path, lora: bool) -> None:
    plain, held = load(), load()
    callback = SpardCallback(EXAMPLES, Spard(tau=4.0, eta_safe=3.0))

    trainer(plain, tmp_path, None, lora=lora).train()
    trainer(held, tmp_path, callback, lora=lora).train()

    losses = [evaluate(each.model, refusals(each), each.tokenizer.pad_token_id).loss for each in (plain, held)]
    assert losses[1] < losses[0]
    assert len(callback.metrics) == 12
    assert any(step.get("spag/triggered") for step in callback.metrics)


def test_a_constraint_that_is_never_violated_changes_nothing(load: Callable[..., Base], tmp_path: Path) -> None:
    plain, held = load(), load()
    trainer(plain, tmp_path, None).train()
    trainer(held, tmp_path, SpardCallback(EXAMPLES, Spard(tau=20.0, anchor_weight=0.0))).train()
    assert all(torch.equal(x, y) for x, y in zip(weights(held), weights(plain), strict=True))


def test_tau_is_the_models_own_safe_loss_before_training(base: Base, tmp_path: Path) -> None:
    callback = SpardCallback(EXAMPLES)
    own = evaluate(base.model, refusals(base), base.tokenizer.pad_token_id)
    trainer(base, tmp_path, callback, max_steps=1).train()
    assert callback.tau == pytest.approx({"mean": own.loss, "prefix": own.prefix_loss}, rel=1e-5)


def test_accumulated_batches_are_projected_once(base: Base, tmp_path: Path) -> None:
    callback = SpardCallback(EXAMPLES)
    trainer(base, tmp_path, callback, gradient_accumulation_steps=2).train()
    assert len(callback.metrics) == 6


@pytest.mark.parametrize("defense", [Spard(), Spard(variant="gated", bound="excess")], ids=["default", "gated"])
def test_a_resumed_trainer_ends_where_an_uninterrupted_one_does(
    load: Callable[..., Base], tmp_path: Path, defense: Spard
) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 8}
    whole, resumed = load(), load()
    trainer(whole, tmp_path, SpardCallback(EXAMPLES, defense), **saving).train()
    shutil.rmtree(tmp_path / "checkpoint-12", ignore_errors=True)

    trainer(resumed, tmp_path, SpardCallback(EXAMPLES, defense), **saving).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-8")
    )

    assert all(torch.equal(x, y) for x, y in zip(weights(resumed), weights(whole), strict=True))


def test_a_checkpoint_from_before_the_anchor_goes_on_without_it(load: Callable[..., Base], tmp_path: Path) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 8}
    old = SpardCallback(EXAMPLES, Spard(anchor_weight=0.0, augment=()))
    trainer(load(), tmp_path, old, **saving).train()
    (state,) = (tmp_path / "checkpoint-8" / "spard").glob("step-*")
    tensors, kept = load_state(state)
    save_state(state.parent, 8, tensors, {name: kept[name] for name in ("tau", "drawn")})  # as it was written then

    resumed = SpardCallback(EXAMPLES)
    trainer(load(), tmp_path, resumed, **saving).train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))

    assert resumed.safe.encoded == resumed.safe.plain
    assert resumed.metrics == old.metrics[8:]


def test_without_its_own_part_of_a_checkpoint_a_resume_is_refused(load: Callable[..., Base], tmp_path: Path) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 8}
    trainer(load(), tmp_path, None, **saving).train()
    with pytest.raises(InvalidRecipe, match="tau"):
        trainer(load(), tmp_path, SpardCallback(EXAMPLES), **saving).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-8")
        )


def test_it_needs_safe_examples() -> None:
    with pytest.raises(InvalidData, match="safe examples"):
        SpardCallback([])


def test_it_needs_the_tokenizer(base: Base, tmp_path: Path) -> None:
    bare = trainer(base, tmp_path, SpardCallback(EXAMPLES))
    bare.callback_handler.processing_class = None  # as of a Trainer that was given none

    with pytest.raises(InvalidRecipe, match="processing_class"):
        bare.train()


def test_safe_rows_are_tokenized_as_the_training_loop_does(base: Base, tmp_path: Path) -> None:
    callback = SpardCallback(EXAMPLES)
    trainer(base, tmp_path, callback, max_steps=1).train()
    assert callback.safe.plain == encode_all(base.tokenizer, EXAMPLES, 256)
    assert callback.safe.encoded[: len(EXAMPLES)] == callback.safe.plain
    assert [row.twin for row in callback.safe.encoded[len(EXAMPLES) :]] == list(range(len(EXAMPLES)))
