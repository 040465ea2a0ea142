from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spard.config import Lora, Recipe
from spard.data.batches import collate
from spard.data.chat import NO_LOSS
from spard.losses import cross_entropy as losses_module
from spard.losses.relative import make_reference, token_divergences
from spard.models.base import Base
from spard.models.lora import trainable_model
from tests.spard.parts import CONFIGS, mask_and_labels, refusals


def random_move(base: Base, lora: Lora | None) -> tuple[Tensor, Tensor, Tensor]:
    """Divergences after the parameters were moved at random, and the logits before and after at labeled tokens."""
    trainable_model(base.model, Recipe(lora=lora))
    base.model.eval()
    batch = collate(refusals(base), base.tokenizer.pad_token_id, "cpu")
    is_label_BT = mask_and_labels(refusals(base))[1][:, 1:] != NO_LOSS
    reference = make_reference(base.model, has_lora=lora is not None)
    with torch.no_grad():
        before_SV = base.model(input_ids=batch.ids_BT).logits[:, :-1][is_label_BT]
        for part in base.model.parameters():
            if part.requires_grad:
                part.add_(0.05 * torch.randn(part.shape, generator=torch.Generator().manual_seed(part.numel())))
        after_SV = base.model(input_ids=batch.ids_BT).logits[:, :-1][is_label_BT]
        return token_divergences(base.model, reference, batch), before_SV, after_SV


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("lora", [Lora(rank=4), None])
def test_it_is_the_divergence_of_the_distributions(
    load: Callable[..., Base], architecture: str, lora: Lora | None
) -> None:
    found_S, before_SV, after_SV = random_move(load(architecture), lora)
    p_SV = before_SV.softmax(dim=1)
    expected_S = (p_SV * (before_SV.log_softmax(dim=1) - after_SV.log_softmax(dim=1))).sum(dim=1)
    torch.testing.assert_close(found_S, expected_S, rtol=1e-3, atol=1e-5)
    assert found_S.min() > -1e-5
    assert found_S.max() > 1e-3


def test_long_batches_go_in_chunks_to_the_same_result(
    load: Callable[..., Base], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _, _ = random_move(load(), Lora(rank=4))
    monkeypatch.setattr(losses_module, "_CHUNK", 262 * 50)
    torch.testing.assert_close(random_move(load(), Lora(rank=4))[0], whole, rtol=1e-3, atol=1e-5)
