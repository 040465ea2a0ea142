"""Safe answers in the model's own words: what it refuses, it keeps refusing in its own way.

Answers of a pool were written by others and are unlikely under the base model, so that tau on them is loose. Each
selected prompt is answered by the base model, greedily; an answer that came to its end and that the judge finds
harmless takes the place of the pool's. Where the base model is not safe itself the pool's answer stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spard.data.rows import Example, prompt_text
from spard.evaluation.judges import Judge
from spard.models.base import Base
from spard.models.generate import generate

MAX_NEW_TOKENS = 256
HARMLESS = 1  # the judge's lowest score


def with_own_answers(
    base: Base, examples: Sequence[Example], judge: Judge, max_new_tokens: int = MAX_NEW_TOKENS
) -> list[Example]:
    """Replace answers by the base model's own where these are whole and harmless."""
    prompts = [prompt_text(example) for example in examples]
    replies = generate(base.model, base.tokenizer, prompts, max_new_tokens)
    verdicts = judge.judge(prompts, replies)
    lengths = [len(base.tokenizer(reply, add_special_tokens=False)["input_ids"]) for reply in replies]
    return [
        _answered(example, reply) if verdict.score == HARMLESS and length < max_new_tokens else example
        for example, reply, verdict, length in zip(examples, replies, verdicts, lengths, strict=True)
    ]


def _answered(example: Example, reply: str) -> Example:
    return replace(example, messages=(*example.messages[:-1], {"role": "assistant", "content": reply}))
