from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spard.config import Recipe
from spard.models.base import Base, load_base
from spard.models.lora import trainable_model
from spard.selection.embeddings import embed
from tests.spard.parts import CONFIGS

TEXTS = ["short", "a text of middle length", "x" * 90, "", "caf\u00e9"]


@torch.no_grad()
def one_by_one(base: Base, texts: list[str]) -> Tensor:
    rows = []
    for text in texts:
        ids = base.tokenizer(text)["input_ids"] or [base.tokenizer.eos_token_id]
        out = base.model(torch.tensor([ids]), output_hidden_states=True)
        rows.append(out.hidden_states[-1][0].float().mean(dim=0))
    return torch.stack(rows)


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("batch_tokens", [1, 64, 8192])
def test_batched_embeddings_equal_those_made_one_by_one(
    load: Callable[..., Base], architecture: str, batch_tokens: int
) -> None:
    base = load(architecture)
    found = embed(base, TEXTS, batch_tokens=batch_tokens)
    torch.testing.assert_close(found, one_by_one(base, TEXTS), rtol=1e-4, atol=1e-4)


def test_texts_are_cut_at_the_limit(base: Base) -> None:
    torch.testing.assert_close(embed(base, ["abcdefgh"], max_tokens=4), embed(base, ["abcd"]))


def test_the_models_own_precision_is_kept(model_folder: Callable[..., Path]) -> None:
    base = load_base(model_folder(), device="cpu", dtype=torch.bfloat16)
    assert embed(base, TEXTS).dtype == torch.bfloat16


def test_no_text_gives_no_row(base: Base) -> None:
    assert embed(base, []).shape == (0, 32)


def test_adapters_do_not_change_embeddings(base: Base) -> None:
    before = embed(base, TEXTS)
    trainable_model(base.model, Recipe())
    for name, part in base.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(part)

    assert torch.equal(embed(base, TEXTS), before)
    assert all(part.requires_grad for name, part in base.model.named_parameters() if "lora" in name)
