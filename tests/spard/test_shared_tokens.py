"""Tokens that all rows of a pass begin with go through the model once, and states and gradients stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, MistralConfig, Phi3Config

from spard.config import Lora, Recipe
from spard.config.defenses.none import NoDefense
from spard.losses.gradients import gradient
from spard.models import forward
from spard.models.decoding import prefill
from spard.models.forward import final_states
from spard.models.lora import trainable_model
from spard.training.compute import OperationCounter
from tests.spard.parts import CONFIGS, RECURRENT, SIZES, away

SHARED, ROWS = 40, 4


@pytest.fixture(autouse=True)
def share_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """In models as small as these, sharing costs more than it saves."""
    monkeypatch.setattr(forward, "LEAST_SAVED", 1)


def rows(lengths: tuple[int, ...] = (60, 47, 41, 55), shared: int = SHARED) -> Tensor:
    """Rows `[B, T]` that begin with the same tokens, padded on the right."""
    made = torch.Generator().manual_seed(0)
    ids_BT = torch.full((len(lengths), max(lengths)), SIZES["pad_token_id"])
    for row, length in zip(ids_BT, lengths, strict=True):
        row[:length] = torch.randint(32, 127, (length,), generator=made)
    ids_BT[:, :shared] = ids_BT[0, :shared].clone()
    ids_BT[:, shared] = torch.arange(len(lengths))  # the first own token of each differs
    return ids_BT


def make(config: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).train()


def lengths_seen(model: Any, call: Callable[[], object]) -> list[tuple[int, int]]:
    """Return the rows and tokens of each call of the decoder."""
    seen: list[tuple[int, int]] = []
    hook = model.get_decoder().register_forward_hook(
        lambda module, inputs, output: seen.append((*output[0].shape[:2],))
    )
    call()
    hook.remove()
    return seen


@pytest.mark.parametrize("architecture", CONFIGS)
def test_states_and_gradients_are_those_of_rows_alone(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids_BT = make(CONFIGS[architecture](**SIZES)), rows()
    model = trainable_model(model, Recipe(defense=NoDefense(), lora=Lora(rank=4)))
    theta = [part for part in model.parameters() if part.requires_grad]
    for part in theta:  # an adapter begins as zero, and half of its gradients with it
        part.data.normal_(std=0.1)

    def states_and_gradients() -> tuple[Tensor, Any]:
        states_BTD = final_states(model, ids_BT)
        # Every position counts, the shared ones too: a customer's rows may be learned from their first token on.
        return states_BTD.detach(), gradient((states_BTD * states_BTD.sigmoid()).sum(), theta)

    together = states_and_gradients()
    assert lengths_seen(model, states_and_gradients) == [(1, SHARED), (ROWS, 60 - SHARED)]
    monkeypatch.setattr(forward, "LEAST_SAVED", 2**62)
    alone = states_and_gradients()
    assert lengths_seen(model, states_and_gradients) == [(ROWS, 60)]
    assert away([together[0]], [alone[0]]) < 1e-5
    assert away(together[1], alone[1]) < 1e-4


def test_equal_rows_keep_a_token_of_their_own() -> None:
    model, ids_BT = make(CONFIGS["llama"](**SIZES)), rows()[:1].repeat(3, 1)
    assert lengths_seen(model, lambda: final_states(model, ids_BT)) == [(1, 59), (3, 1)]


BY_LENGTH: dict[str, Any] = {
    "original_max_position_embeddings": 48,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
}
WHOLE = {
    "a window that slides": MistralConfig(**SIZES, sliding_window=12),
    "angles by the row's length": Phi3Config(**SIZES | BY_LENGTH),
    **RECURRENT,
}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_model_that_cannot_share_gets_whole_rows(kind: str) -> None:
    model = make(WHOLE[kind])
    assert lengths_seen(model, lambda: final_states(model, rows())) == [(ROWS, 60)]


def test_a_model_that_keeps_nothing_in_the_cache_gets_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(DynamicCache):
        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            return key_states, value_states

    model, ids_BT = make(CONFIGS["llama"](**SIZES)).eval(), rows()
    expected = model.get_decoder()(input_ids=ids_BT, use_cache=False).last_hidden_state
    monkeypatch.setattr(forward, "DynamicCache", Elsewhere)
    assert away([final_states(model, ids_BT).detach()], [expected.detach()]) < 1e-5


def test_long_rows_that_change_their_angles_share_nothing_and_short_ones_do() -> None:
    """In training and in replies: a beginning that was computed alone has the angles of short rows."""
    model = make(Phi3Config(**SIZES | BY_LENGTH)).eval()
    short = rows((47, 45, 41, 43))
    assert lengths_seen(model, lambda: final_states(model, short)) == [(1, SHARED), (ROWS, 47 - SHARED)]
    alone = model.get_decoder()(input_ids=short, use_cache=False).last_hidden_state.detach()
    assert away([final_states(model, short).detach()], [alone]) < 1e-5
    with torch.no_grad():
        assert len(prefill(model, short[:, :41].tolist()).tokens) == SHARED
        assert len(prefill(model, rows((60, 60, 60, 60)).tolist()).tokens) == 0


@pytest.mark.parametrize(("less", "is_shared"), [(0, True), (1, False)])
def test_few_saved_tokens_are_not_worth_a_call_of_their_own(
    less: int, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger model saves as much time with fewer tokens."""
    monkeypatch.setattr(forward, "LEAST_SAVED", SHARED * (ROWS - 1) * SIZES["hidden_size"])
    model = make(CONFIGS["llama"](**SIZES))
    seen = lengths_seen(model, lambda: final_states(model, rows(shared=SHARED - less)))
    assert (len(seen) == 2) == is_shared


def test_checkpointing_gets_whole_rows() -> None:
    recipe = Recipe(defense=NoDefense(), lora=Lora(rank=4), gradient_checkpointing=True)
    model = trainable_model(make(CONFIGS["llama"](**SIZES)), recipe)
    assert lengths_seen(model, lambda: final_states(model, rows())) == [(ROWS, 60)]


def test_shared_tokens_are_counted_once() -> None:
    model, ids_BT = make(CONFIGS["llama"](**SIZES)), rows()
    model = trainable_model(model, Recipe(defense=NoDefense(), lora=Lora(rank=4)))
    theta = [part for part in model.parameters() if part.requires_grad]
    counter = OperationCounter(model, checkpointing=False)
    with counter.counting():
        gradient(final_states(model, ids_BT).sum(), theta)
    counter.close()
    assert counter.forward_tokens == counter.backward_tokens == SHARED + ROWS * (60 - SHARED)
