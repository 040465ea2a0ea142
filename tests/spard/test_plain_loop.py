"""A whole training without a defense beside a loop that anybody would write with torch and PEFT: the same losses."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from spard.config import Hyperparameters, Lora, NoDefense, Recipe, resolve
from spard.data.batches import batches
from spard.data.chat import NO_LOSS, EncodedSample, encode_all
from spard.models import forward
from spard.models.base import Base
from spard.training.train import train
from tests.spard.parts import away, chat, mask_and_labels

BATCH, EPOCHS, RATE, RANK, SEED = 6, 3, 2e-3, 4, 7
RECIPE = Recipe(
    defense=NoDefense(),
    lora=Lora(rank=RANK, alpha=8.0, dropout=0.0),
    hyperparameters=Hyperparameters(n_epochs=EPOCHS, batch_size=BATCH),
    learning_rate=RATE,
    warmup_ratio=0.0,
    seed=SEED,
)
# Norms round gradients to single precision, of shared tokens once for all rows of a pass: in double precision only rows
# that go through the model alone give the plain loop's losses to more digits.
TOLERANCE = {(torch.float64, False): 1e-10, (torch.float64, True): 1e-6, (torch.float32, True): 1e-5}


@pytest.mark.parametrize(("dtype", "has_shared"), TOLERANCE)
@pytest.mark.parametrize(
    "cut",
    [{}, {"pass_tokens": 10**6}, {"pass_tokens": 120}, {"micro_batch_size": 2}],
    ids=lambda cut: str(cut) or "one",
)
def test_the_losses_are_those_of_a_plain_loop(
    load: Callable[..., Base],
    dtype: torch.dtype,
    has_shared: bool,
    cut: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forward, "LEAST_SAVED", 1 if has_shared else 2**62)
    tolerance = TOLERANCE[dtype, has_shared]
    expected, adapter = plain_loop(load(dtype=dtype))
    base = load(dtype=dtype)
    rows = draw_rows(base)
    recipe = replace(RECIPE, **cut)

    found = train(base, rows, [], recipe, resolve(recipe, len(rows), base.hidden_size))

    assert [each["loss/task"] for each in found.metrics] == pytest.approx(expected, rel=tolerance)
    trained = [part.detach() for part in base.model.parameters() if part.requires_grad]
    assert away(trained, adapter) < 100 * tolerance


def draw_rows(base: Base) -> list[EncodedSample]:
    """Rows of very different lengths, so that a batch is mostly padding unless it is cut."""
    rng = random.Random(1)
    rows = [chat("Add. " * rng.randint(1, 12), "It is so. " * rng.randint(1, 8)) for _ in range(20)]
    return encode_all(base.tokenizer, rows, 256)


def plain_loop(base: Base) -> tuple[list[float], list[torch.Tensor]]:
    """Each batch in one piece, padded to its longest row, in the mean over its answers' tokens."""
    rows = draw_rows(base)
    torch.manual_seed(SEED)
    asked: Any = peft.LoraConfig(
        r=RANK, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]
    )
    model: Any = peft.get_peft_model(base.model, asked).train()
    theta = [part for part in model.parameters() if part.requires_grad]
    optimizer = AdamW(theta, lr=RATE, weight_decay=0.01)
    steps = [
        [rows[i] for i in batch]
        for epoch in range(EPOCHS)
        for batch in batches(SEED, epoch, [row.tokens for row in rows], BATCH)
    ]
    losses = []
    for number, batch in enumerate(steps):
        optimizer.param_groups[0]["lr"] = RATE * (len(steps) - number) / len(steps)
        ids_BT, mask_BT, labels_BT = pad_rows(batch)
        logits_BTV = model(input_ids=ids_BT, attention_mask=mask_BT).logits[:, :-1]
        loss = cross_entropy(logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=NO_LOSS)
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(theta, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [part.detach() for part in theta]


def pad_rows(rows: Sequence[EncodedSample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mask_BT, labels_BT = mask_and_labels(rows)
    ids = [[*row.ids, *[0] * (mask_BT.shape[1] - len(row.ids))] for row in rows]
    return torch.tensor(ids), mask_BT, labels_BT
