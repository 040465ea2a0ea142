"""Answers to many prompts at once: left-padded batches of similar length over a key-value cache.

They are greedy unless a sampler is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from spard import distributed
from spard.data.chat import render_question
from spard.data.control_tokens import end_tokens
from spard.models.sampling import Pick, Sampler
from spard.models.sharding import inference, is_sharded

BATCH = 64


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    max_new_tokens: int,
    batch_size: int = BATCH,
    system: str | None = None,
) -> list[str]:
    """Return the model's greedy reply to each prompt, in order; a reply ends at the first special token."""
    return complete(model, tokenizer, as_requests(tokenizer, prompts, system), max_new_tokens, batch_size)


def as_requests(tokenizer: Any, prompts: Sequence[str], system: str | None = None) -> list[list[int]]:
    """Each prompt as what a user says, under a system prompt if there is one, in tokens."""
    return [render_question(tokenizer, prompt, system) for prompt in prompts]


def complete(
    model: Any, tokenizer: Any, rows: Sequence[Sequence[int]], max_new_tokens: int, batch_size: int = BATCH
) -> list[str]:
    """Return what the model continues each row of tokens with, in order."""
    replies = [""] * len(rows)
    for places, texts, _ in stream(model, tokenizer, rows, max_new_tokens, batch_size):
        for i, text in zip(places, texts, strict=True):
            replies[i] = text
    return replies


def stream(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int = BATCH,
    sampler: Sampler | None = None,
) -> Iterator[tuple[list[int], list[str], list[bool]]]:
    """Yield the replies of each batch, with their rows' places and whether the limit cut them; longest rows first.

    The ranks of a run share the batches, and each of them is told all replies, in the same order.
    """
    longest_first = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    ends = torch.tensor(sorted(ends_of(model, tokenizer)), device=model.device)
    was_training = model.training
    model.eval()
    try:
        in_step = is_sharded(model)
        for batch in distributed.dealt([longest_first[i : i + batch_size] for i in range(0, len(rows), batch_size)]):
            tokens = list[list[int]]()
            if batch or in_step:
                pick = sampler.over(batch) if sampler and batch else _likeliest
                asked = [rows[i] for i in batch] if batch else [rows[0][:1]]
                with inference(model):
                    tokens = _complete(model, asked, tokenizer.pad_token_id, ends, max_new_tokens, pick, in_step)
            for places, found in distributed.gathered((batch, tokens)):
                if places:
                    texts = [text.strip() for text in tokenizer.batch_decode(found)]
                    yield places, texts, [len(each) == max_new_tokens for each in found]
    finally:
        model.train(was_training)


def ends_of(model: Any, tokenizer: Any) -> set[int]:
    """Return the tokens that end a reply: those of the model's own generation, and the tokenizer's special ones."""
    stated = model.generation_config.eos_token_id
    eos = stated if isinstance(stated, Iterable) else [stated] if stated is not None else []
    return {*eos, *end_tokens(tokenizer)}


def _likeliest(logits_BV: Tensor, row_B: Tensor) -> Tensor:
    return logits_BV.argmax(dim=-1)


def _complete(
    model: Any, rows: Sequence[Sequence[int]], pad: int, ends: Tensor, max_new_tokens: int, pick: Pick, in_step: bool
) -> list[list[int]]:
    """Token ids that follow each row, up to its first end token, which is left out.

    `in_step`: all ranks make as many passes as the one with the longest reply.
    """
    width = max(len(row) for row in rows)
    input_BT = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=model.device)
    length_B = torch.tensor([len(row) for row in rows], device=model.device)
    mask_BT = torch.arange(width + max_new_tokens, device=model.device) >= width - length_B.unsqueeze(1)
    position_BT = (mask_BT[:, :width].cumsum(dim=1) - 1).clamp(min=0)
    reply_BT = torch.full((len(rows), max_new_tokens), int(ends[0]), device=model.device)
    row_B = torch.arange(len(rows), device=model.device)  # rows still in the batch
    done_B = torch.zeros(len(rows), dtype=torch.bool, device=model.device)
    cache = DynamicCache(config=model.config)

    for step in range(max_new_tokens):
        logits_B1V = model(
            input_ids=input_BT,
            attention_mask=mask_BT[:, : width + step],
            position_ids=position_BT,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        token_B = pick(logits_B1V[:, -1], row_B)
        reply_BT[row_B, step] = token_B
        done_B = done_B | torch.isin(token_B, ends)
        left = len(done_B) - int(done_B.sum())
        if not (distributed.is_anywhere(left > 0) if in_step else left):
            break
        input_BT, position_BT = token_B.unsqueeze(1), position_BT[:, -1:] + 1
        if left and 2 * left <= len(done_B):
            keep = (~done_B).nonzero().flatten()
            cache.batch_select_indices(keep)
            input_BT, position_BT, mask_BT = input_BT[keep], position_BT[keep], mask_BT[keep]
            row_B, done_B = row_B[keep], done_B[keep]
    return [_until(row, set(ends.tolist())) for row in reply_BT.tolist()]


def _until(tokens: Sequence[int], ends: set[int]) -> list[int]:
    stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[:stop])
