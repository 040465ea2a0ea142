from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from spard.data.batches import Batch, collate
from spard.data.chat import NO_LOSS, EncodedSample
from spard.losses import cross_entropy as losses_module
from spard.losses.cross_entropy import PREFIX, evaluate, token_losses
from spard.losses.gradients import safe_losses, utility_gradient
from spard.models.base import Base
from tests.spard.parts import CONFIGS, SIZES, away, mask_and_labels, refusals, sums

_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
HEADS: dict[str, dict[str, Any]] = {  # models that change what their head gives, each by a setting of its own
    "falcon_h1": {"lm_head_multiplier": 0.25, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
    "recurrent_gemma": {"logits_soft_cap": 0.5, "num_hidden_layers": 3, "attention_window_size": 64},
    "inkling_text": {"logits_mup_width_multiplier": 4.0, **_EXPERTS},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "gemma2": {"final_logit_softcapping": 0.5},
}


def make_batch(base: Base, rows: list[EncodedSample]) -> Batch:
    return collate(rows, base.tokenizer.pad_token_id, "cpu")


@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_loss_is_that_of_transformers(load: Callable[..., Base], architecture: str) -> None:
    base = load(architecture)
    rows = sums(base)
    batch = make_batch(base, rows)

    mask_BT, labels_BT = mask_and_labels(rows)
    expected = base.model(input_ids=batch.ids_BT, attention_mask=mask_BT, labels=labels_BT).loss

    torch.testing.assert_close(token_losses(base.model, batch).loss_S.mean(), expected)


def test_a_head_that_caps_its_logits_is_respected(base: Base) -> None:
    batch = make_batch(base, sums(base))
    plain = token_losses(base.model, batch).loss_S
    base.model.config.final_logit_softcapping = 30.0
    torch.testing.assert_close(token_losses(base.model, batch).loss_S, plain)  # Llama's own forward has no cap


@pytest.mark.parametrize("architecture", HEADS)
def test_what_a_model_makes_of_its_heads_products_is_in_the_loss(base: Base, architecture: str) -> None:
    config = AutoConfig.for_model(architecture, **(SIZES | {"bos_token_id": 256} | HEADS[architecture]))
    torch.manual_seed(0)
    model, rows = AutoModelForCausalLM.from_config(config).eval(), sums(base)
    found = token_losses(model, make_batch(base, rows)).loss_S

    expected = [model(input_ids=torch.tensor([row.ids]), labels=torch.tensor([row.labels])).loss for row in rows]

    counts = [sum(label != NO_LOSS for label in row.labels) for row in rows]
    torch.testing.assert_close(torch.stack([part.mean() for part in torch.split(found, counts)]), torch.stack(expected))


def test_long_batches_in_chunks_give_the_same_loss_and_gradient(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    theta, batch = list(base.model.parameters()), make_batch(base, sums(base))
    whole = utility_gradient(base.model, theta, [batch], 1e9).read()

    monkeypatch.setattr(losses_module, "_CHUNK", 262 * 50)
    chunked = utility_gradient(base.model, theta, [batch], 1e9).read()

    assert chunked.loss == pytest.approx(whole.loss, rel=1e-5)
    assert away(chunked.grad, whole.grad) < 1e-4


@pytest.mark.parametrize("size", [1, 3, 5, 8])
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(base: Base, size: int) -> None:
    theta, rows = list(base.model.parameters()), sums(base)[:8]
    whole = utility_gradient(base.model, theta, [make_batch(base, rows)], 1e9).read()

    pieces = [make_batch(base, rows[i : i + size]) for i in range(0, 8, size)]
    cut = utility_gradient(base.model, theta, pieces, 1e9).read()

    assert (cut.loss, cut.norm, cut.accuracy) == pytest.approx((whole.loss, whole.norm, whole.accuracy), rel=1e-5)
    assert away(cut.grad, whole.grad) < 1e-4


def test_the_gradient_is_clipped_like_torch_does(base: Base) -> None:
    theta, batch = list(base.model.parameters()), make_batch(base, sums(base))
    found = utility_gradient(base.model, theta, [batch], 0.1).read()

    token_losses(base.model, batch).loss_S.mean().backward()
    length = torch.nn.utils.clip_grad_norm_(theta, 0.1)

    assert found.norm == pytest.approx(float(length), rel=1e-5)
    assert away(found.grad, [parameter.grad for parameter in theta]) < 1e-4


def test_safe_losses_are_the_token_mean_and_that_of_the_first_answer_tokens(base: Base) -> None:
    rows = refusals(base)
    found = safe_losses(base.model, [], make_batch(base, rows))

    per_row = [token_losses(base.model, make_batch(base, [row])).loss_S.detach() for row in rows]
    assert found["mean"].value == pytest.approx(float(torch.cat(per_row).mean()), rel=1e-5)
    assert found["prefix"].value == pytest.approx(float(torch.cat([row[:PREFIX] for row in per_row]).mean()), rel=1e-5)


def test_an_evaluation_is_the_mean_over_all_tokens_however_they_are_batched(base: Base) -> None:
    rows = refusals(base)
    pad = base.tokenizer.pad_token_id
    whole = safe_losses(base.model, [], make_batch(base, rows))

    for batch_tokens in (1, 100, 8192):
        found = evaluate(base.model, rows, pad, batch_tokens)
        assert found.loss == pytest.approx(whole["mean"].value, rel=1e-5)
        assert found.prefix_loss == pytest.approx(whole["prefix"].value, rel=1e-5)
        assert found.tokens == sum(label != NO_LOSS for row in rows for label in row.labels)


def test_a_parameter_without_influence_has_a_zero_gradient(base: Base) -> None:
    idle = torch.nn.Parameter(torch.ones(2))
    found = utility_gradient(base.model, [idle, *base.model.parameters()], [make_batch(base, sums(base))], 1.0).read()
    assert found.grad[0].tolist() == [0.0, 0.0]
