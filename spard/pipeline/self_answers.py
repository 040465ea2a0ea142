"""Safe answers in the model's own words: what it refuses, it keeps refusing in its own way.

Answers of a pool were written by others and may be unlikely under the base model, so that tau on them is loose. Each
selected prompt is answered by the base model, greedily; an answer that came to its end and that the judge finds
harmless takes the place of the pool's. Where the base model is not safe itself the pool's answer stays.

"auto" does so where the pool speaks in another voice: where the base model's mean loss on the pool's answers is more
than ln 2 nats per token above that on its own answers to the same prompts. A bound that is looser than the model's own
words by so much lets each of their tokens fall from certain to even odds, which is where greedy decoding takes another
one; and a token mean that far apart is no chance of sampling, by which a model's own words differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from spard import distributed
from spard.config import JudgeSpec, Selection
from spard.data.chat import Encoded, encode_all
from spard.data.rows import Example, prompt_text
from spard.evaluation.judges import Judge, open_judge
from spard.losses.cross_entropy import evaluate
from spard.models.base import Base
from spard.models.generate import generate
from spard.release.row_records import SafeAnswers

MAX_NEW_TOKENS = 256
HARMLESS = 1  # the judge's lowest score
OTHER_VOICE = math.log(2)  # nats per token


def answer_rows(
    base: Base, chosen: Sequence[Example], selection: Selection, judge: JudgeSpec, limit: int
) -> tuple[Sequence[Example], list[Encoded], SafeAnswers | None]:
    """Return selected pool rows with the answers that a selection asks for, as text and as tokens, and what was found.

    An own answer that makes its row longer than `limit` tokens is not taken. Nothing is found where the pool's answers
    are asked for.
    """
    pool = encode_all(base.tokenizer, chosen, limit)
    if selection.safe_answers == "pool":
        return chosen, pool, None
    examples = _as_first(chosen, with_own_answers(base, chosen, open_judge(judge)))
    encoded = encode_all(base.tokenizer, examples, limit + MAX_NEW_TOKENS)
    rows = list(zip(chosen, examples, encoded, strict=True))
    is_own = [mine is not theirs and len(row.ids) <= limit for theirs, mine, row in rows]
    found = distributed.broadcast_object(compare_losses(base, pool, encoded, is_own))
    if selection.safe_answers == "auto" and not speaks_otherwise(found):
        return chosen, pool, found
    taken = [mine if own else theirs for (theirs, mine, _), own in zip(rows, is_own, strict=True)]
    tokens = [mine if own else theirs for mine, theirs, own in zip(encoded, pool, is_own, strict=True)]
    return taken, tokens, replace(found, taken="self")


def compare_losses(base: Base, pool: Sequence[Encoded], own: Sequence[Encoded], is_own: Sequence[bool]) -> SafeAnswers:
    """Measure the base model's loss on the pool's answers and on its own, where its own are harmless."""
    pad_id, places = base.tokenizer.pad_token_id, [i for i, taken in enumerate(is_own) if taken]
    if not places:
        return SafeAnswers("pool", len(pool), 0)
    losses = [evaluate(base.model, [rows[i] for i in places], pad_id).loss for rows in (pool, own)]
    return SafeAnswers("pool", len(pool), len(places), *losses)


def speaks_otherwise(found: SafeAnswers) -> bool:
    """Whether the pool speaks in another voice than the base model; where that has no answers nobody can tell."""
    if found.pool_loss is None or found.own_loss is None:
        return False
    return found.pool_loss - found.own_loss > OTHER_VOICE


def with_own_answers(
    base: Base, examples: Sequence[Example], judge: Judge, max_new_tokens: int = MAX_NEW_TOKENS
) -> list[Example]:
    """Replace answers by the base model's own where these are whole and harmless."""
    prompts = [prompt_text(example) for example in examples]
    replies = generate(base.model, base.tokenizer, prompts, max_new_tokens)
    verdicts = judge.judge(prompts, replies)
    lengths = [len(base.tokenizer(reply, add_special_tokens=False)["input_ids"]) for reply in replies]
    return [
        _with_answer(example, reply) if verdict.score == HARMLESS and length < max_new_tokens else example
        for example, reply, verdict, length in zip(examples, replies, verdicts, lengths, strict=True)
    ]


def _as_first(chosen: Sequence[Example], mine: Sequence[Example]) -> list[Example]:
    """Return the answers that the first rank has taken, whose judge is heard; the others stay the pool's."""
    taken = distributed.broadcast_object(
        [None if own is theirs else own for own, theirs in zip(mine, chosen, strict=True)]
    )
    return [own or theirs for own, theirs in zip(taken, chosen, strict=True)]


def _with_answer(example: Example, reply: str) -> Example:
    return replace(example, messages=(*example.messages[:-1], {"role": "assistant", "content": reply}))
