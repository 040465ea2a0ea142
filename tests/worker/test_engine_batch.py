"""Rows of an engine's batch that leave do not change what the others say."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from tests.spard.parts import RECURRENT
from worker.engine.batch import BASE, Batch

PROMPT = list(range(5, 25))
LEAVE = {3: [1, 2], 6: [1]}  # after so many tokens, the places of the rows that stay


@pytest.mark.parametrize("config", RECURRENT.values(), ids=RECURRENT)
def test_replies_of_a_recurrent_model_go_on_where_others_to_the_same_prompt_end(config: PretrainedConfig) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    alone, beside = Batch(model), Batch(model)
    alone.join(PROMPT, BASE, 1)
    beside.join(PROMPT, BASE, 3)

    said: list[list[int]] = [[], []]
    for number in range(12):
        if number in LEAVE:
            beside.keep(LEAVE[number])
        for each, batch in zip(said, (alone, beside), strict=True):
            tokens = batch.logits_BV.argmax(dim=-1).tolist()
            each.append(tokens[-1])
            batch.step(tokens)

    assert len(set(said[0])) > 4
    assert said[1] == said[0]
