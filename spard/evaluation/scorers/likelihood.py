"""Multiple choice by likelihood: the choice with the highest likelihood under the model after the prompt.

As in lm-evaluation-harness with a chat template: `likelihood` compares sums of log-probabilities (its `acc`),
`likelihood_norm` divides them by the choice's length in bytes (its `acc_norm` divides by characters).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from spard import distributed
from spard.data.batches import Batch, collate
from spard.data.chat import NO_LOSS, Encoded, render_question
from spard.data.rows import Prompt
from spard.models.sharding import inference, is_sharded


def likeliest(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], batch_size: int = 16, system: str | None = None
) -> list[str]:
    """Return the likeliest choice of each prompt; `system` is the system prompt that the model is served with."""
    rows = [[_encode_choice(tokenizer, each, choice, system) for choice in each.choices] for each in prompts]
    sums = iter(_log_likelihoods(model, tokenizer.pad_token_id, list(chain.from_iterable(rows)), batch_size))
    return [_best(each, [next(sums) for _ in each.choices]) for each in prompts]


def _best(prompt: Prompt, sums: Sequence[float]) -> str:
    """Return the choice with the best score; the first of equal ones."""
    by_byte = prompt.scorer == "likelihood_norm"
    scores = [
        total / (len(choice.encode()) if by_byte else 1) for total, choice in zip(sums, prompt.choices, strict=True)
    ]
    return prompt.choices[scores.index(max(scores))]


def _encode_choice(tokenizer: Any, prompt: Prompt, choice: str, system: str | None) -> Encoded:
    asked = render_question(tokenizer, prompt.prompt, system)
    said: list[int] = tokenizer(choice, add_special_tokens=False)["input_ids"]
    return Encoded((*asked, *said), (*[NO_LOSS] * len(asked), *said))


def _log_likelihoods(model: Any, pad: int, rows: Sequence[Encoded], batch_size: int) -> list[float]:
    """Return the summed log-probability of each row's labels, in batches of similar length shared among the ranks."""
    longest_first = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
    sums = dict[int, float]()
    for dealt in distributed.rank_batches([longest_first[i : i + batch_size] for i in range(0, len(rows), batch_size)]):
        if not dealt and not is_sharded(model):
            continue
        # With sharded weights a rank without a batch still runs a forward pass, since the others need its shard.
        picked = dealt or []
        batch = collate([rows[i] for i in picked] or [rows[0]], pad, model.device)
        with inference(model):
            sums |= zip(picked, _sums(model, batch).tolist()[: len(picked)], strict=True)
    every = {i: total for part in distributed.gather_objects(sums) for i, total in part.items()}
    return [every[i] for i in range(len(rows))]


def _sums(model: Any, batch: Batch) -> Tensor:
    logits_BTV = model(input_ids=batch.ids_BT).logits  # causal attention ignores the padding on the right
    logits_SV = logits_BTV.flatten(0, 1).index_select(0, batch.at_S).float()
    log_p_S = logits_SV.log_softmax(dim=-1).gather(-1, batch.label_S.unsqueeze(-1)).squeeze(-1)
    sum_B: Tensor = batch.on_grid(log_p_S).sum(dim=1)
    return sum_B
