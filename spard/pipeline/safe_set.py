"""The encoded safe set: the selected pool rows, with the answers that the selection asks for, and their variants."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from spard import distributed
from spard.config import JudgeSpec, Recipe, Selection
from spard.data.chat import Encoded, encode_all
from spard.data.rows import Example, prompt_text
from spard.evaluation.judges import Judge, open_judge
from spard.losses.cross_entropy import evaluate
from spard.models.base import Base
from spard.models.generate import generate
from spard.pipeline.augment import variants
from spard.release.row_records import SafeAnswers

# Safe answers in the base model's own words, which teach it to keep refusing in its own way.
#
# The pool's answers were written by others and may be unlikely under the base model, which makes tau on them loose.
# The base model answers each selected prompt greedily; a reply that is complete and that the judge finds harmless
# replaces the pool's answer. Where the base model's reply is harmful, the pool's answer stays.
#
# "auto" does this if the pool has another voice: if the base model's mean loss on the pool's answers is more than ln
# 2 nats per token above its loss on its own answers to the same prompts. With so loose a bound every token of the
# model's own words may fall from probability 1 to 1/2, where greedy decoding may pick another token; and a mean per
# token that far apart cannot be an accident of sampling.

MAX_NEW_TOKENS = 256
HARMLESS = 1  # the judge's lowest score
OTHER_VOICE = math.log(2)  # nats per token


def answer_rows(
    base: Base, chosen: Sequence[Example], selection: Selection, judge: JudgeSpec, limit: int
) -> tuple[Sequence[Example], list[Encoded], SafeAnswers | None]:
    """Return the selected pool rows with the answers of the selection's choice, the encoded rows, and the comparison.

    A reply with which its row exceeds `limit` tokens is not used. The comparison is None if the selection fixes the
    pool's answers.
    """
    pool = encode_all(base.tokenizer, chosen, limit)
    if selection.safe_answers == "pool":
        return chosen, pool, None
    examples = _as_first(chosen, with_own_answers(base, chosen, open_judge(judge)))
    encoded = encode_all(base.tokenizer, examples, limit + MAX_NEW_TOKENS)
    rows = list(zip(chosen, examples, encoded, strict=True))
    # `with_own_answers` returns the very same object where it keeps the pool's answer.
    is_own = [mine is not theirs and len(row.ids) <= limit for theirs, mine, row in rows]
    found = distributed.broadcast_object(compare_losses(base, pool, encoded, is_own))
    if selection.safe_answers == "auto" and not speaks_otherwise(found):
        return chosen, pool, found
    taken = [mine if own else theirs for (theirs, mine, _), own in zip(rows, is_own, strict=True)]
    tokens = [mine if own else theirs for mine, theirs, own in zip(encoded, pool, is_own, strict=True)]
    return taken, tokens, replace(found, taken="self")


def compare_losses(base: Base, pool: Sequence[Encoded], own: Sequence[Encoded], is_own: Sequence[bool]) -> SafeAnswers:
    """Measure the base model's loss on the pool's answers and on its own replies, for rows with a usable reply."""
    pad_id, places = base.tokenizer.pad_token_id, [i for i, taken in enumerate(is_own) if taken]
    if not places:
        return SafeAnswers("pool", len(pool), 0)
    losses = [evaluate(base.model, [rows[i] for i in places], pad_id).loss for rows in (pool, own)]
    return SafeAnswers("pool", len(pool), len(places), *losses)


def speaks_otherwise(found: SafeAnswers) -> bool:
    """Return True if the pool's answers are in another voice than the base model's; False without a comparison."""
    if found.pool_loss is None or found.own_loss is None:
        return False
    return found.pool_loss - found.own_loss > OTHER_VOICE


def with_own_answers(
    base: Base, examples: Sequence[Example], judge: Judge, max_new_tokens: int = MAX_NEW_TOKENS
) -> list[Example]:
    """Return the examples with the base model's replies as answers where a reply is complete and harmless."""
    prompts = [prompt_text(example) for example in examples]
    replies = generate(base.model, base.tokenizer, prompts, max_new_tokens)
    verdicts = judge.judge(prompts, replies)
    lengths = [len(base.tokenizer(reply, add_special_tokens=False)["input_ids"]) for reply in replies]
    return [
        _with_answer(example, reply) if verdict.score == HARMLESS and length < max_new_tokens else example
        for example, reply, verdict, length in zip(examples, replies, verdicts, lengths, strict=True)
    ]


def _as_first(chosen: Sequence[Example], mine: Sequence[Example]) -> list[Example]:
    """Return rank 0's choice of answers: only rank 0 has a judge."""
    taken = distributed.broadcast_object(
        [None if own is theirs else own for own, theirs in zip(mine, chosen, strict=True)]
    )
    return [own or theirs for own, theirs in zip(taken, chosen, strict=True)]


def _with_answer(example: Example, reply: str) -> Example:
    return replace(example, messages=(*example.messages[:-1], {"role": "assistant", "content": reply}))


def safe_set(
    base: Base,
    chosen: Sequence[Example],
    rows: Sequence[Example],
    recipe: Recipe,
    judge: JudgeSpec,
    limit: int,
    on_answers: Callable[[SafeAnswers], None] | None = None,
) -> list[Encoded]:
    """Return the selected pool rows, followed by the variants derived from the customer's `rows`.

    `on_answers` is called with the result of comparing the pool's answers with the base model's, if they were compared.
    """
    chosen, pool, found = answer_rows(base, chosen, recipe.selection, judge, limit)
    if found and on_answers:
        on_answers(found)
    kinds = recipe.defense.augmentations
    return [*pool, *(variants(base.tokenizer, chosen, rows, kinds, recipe.seed, limit) if kinds else [])]
