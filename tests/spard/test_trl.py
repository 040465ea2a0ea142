"""The callback in TRL's trainer; TRL is no dependency of ours, so this runs where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spard.config import Spard
from spard.integrations.transformers import SpardCallback
from spard.losses.cross_entropy import evaluate
from spard.models.base import Base
from tests.spard.parts import chat, refusals

trl = pytest.importorskip("trl", reason="TRL is not installed")
datasets = pytest.importorskip("datasets")

EXAMPLES = [chat(f"Do harm number {i}{'!' * i}", f"I cannot help with {i}.") for i in range(7)]


def sft(base: Base, folder: Path, callbacks: list[Any]) -> Any:
    torch.manual_seed(0)
    rows = [
        {"prompt": [{"role": "user", "content": f"Add {i}"}], "completion": [{"role": "assistant", "content": str(i)}]}
        for i in range(16)
    ]
    args = trl.SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=3,
        learning_rate=5e-3,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        seed=3,
    )
    data = datasets.Dataset.from_list(rows)
    return trl.SFTTrainer(
        model=base.model, args=args, train_dataset=data, processing_class=base.tokenizer, callbacks=callbacks
    )


@pytest.mark.filterwarnings("ignore")  # theirs
def test_trl_s_trainer_holds_the_safe_loss(load: Callable[..., Base], tmp_path: Path) -> None:
    plain, held = load(), load()
    callback = SpardCallback(EXAMPLES, Spard(tau=4.0, eta_safe=3.0))

    sft(plain, tmp_path / "plain", []).train()
    sft(held, tmp_path / "held", [callback]).train()

    losses = [evaluate(each.model, refusals(each), each.tokenizer.pad_token_id).loss for each in (plain, held)]
    assert losses[1] < losses[0]
    assert any(step.get("spag/triggered") for step in callback.metrics)
