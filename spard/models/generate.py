"""Replies to many prompts at once: left-padded batches of similar length over a key-value cache.

Decoding is greedy unless a sampler is given. A reply ends early if its remaining tokens cannot change the verdict
(`settler`): each row is checked every few tokens, from the moment when it may have enough characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spard import distributed
from spard.data.batches import cut
from spard.data.chat import get_renderer, render_question
from spard.errors import is_gpu_out_of_memory
from spard.models.budget import Tell, generated_rows, generated_tokens
from spard.models.decoding import Replies, Rows, Sampler, advance_, begin, is_plain, prefill
from spard.models.sharding import inference, is_sharded

_AGAIN = 8  # tokens until a long enough but unsettled reply is checked again
_HASTE = 0.8  # share of the estimated missing tokens


@dataclass(frozen=True, slots=True)
class EarlyEnds:
    """Replies that may end early: rows at `places`, with at least `least` characters, for which `holds` is True.

    `holds(place, text)` returns True if the rest of that reply does not matter.
    """

    places: frozenset[int]
    least: int
    holds: Callable[[int, str], bool]

    def renumber(self, places: Sequence[int]) -> EarlyEnds:
        """Return the same rule for renumbered rows: row i had the number `places[i]` before."""
        own = frozenset(i for i, place in enumerate(places) if place in self.places)
        return EarlyEnds(own, self.least, lambda i, text: self.holds(places[i], text))


def decode_replies(tokenizer: Any, tokens: Sequence[Sequence[int]]) -> list[str]:
    """Decode replies without reasoning, the template's tokens and the opening of an answer."""
    content_of = get_renderer(tokenizer).reply_content
    return [content_of(text).strip() for text in tokenizer.batch_decode(tokens)]


def settler(tokenizer: Any, settled: EarlyEnds | None) -> Callable[[Rows], None] | None:
    """Return the callback that ends settled rows; None if later tokens can change the text of a reply so far.

    That is the case with templates that know reasoning or open an answer with their own tokens: the text before the
    answer is dropped once the answer begins.
    """
    if settled is None:
        return None
    renderer = get_renderer(tokenizer)
    if renderer.knows_reasoning or renderer.opening.strip():
        return None

    due: dict[int, int] = {}  # by row: number of tokens at its next check

    def settle_(rows: Rows) -> None:
        done, counts, places = (each.tolist() for each in (rows.done_B, rows.said_B, rows.place_B))
        at = [
            i
            for i, place in enumerate(places)
            if not done[i] and place in settled.places and counts[i] >= due.get(place, 1)
        ]
        if not at:
            return
        tokens = [said[: counts[i]] for i, said in zip(at, rows.reply_BN[at].tolist(), strict=True)]
        ended = []
        for i, text in zip(at, decode_replies(tokenizer, tokens), strict=True):
            if len(text) < settled.least:
                missing = (settled.least - len(text)) / max(1, len(text))
                # Estimate the missing tokens from the reply's own rate of characters, and check a little early.
                due[places[i]] = counts[i] + max(1, int(_HASTE * missing * counts[i]))
            elif settled.holds(places[i], text):
                ended.append(i)
            else:
                due[places[i]] = counts[i] + _AGAIN
        rows.done_B[ended] = True
        rows.early_B[ended] = True

    return settle_


MOST_ROWS = 512  # maximum rows at once: more delay the first replies for the judge
STEP = 16  # overhead of a token's pass on a CPU, in padded tokens: 10 to 20 for 0.4 to 135 million parameters
STEPS = 64  # tokens of a reply that count as such passes: longer ones mostly end beside the next batch
CARRIED = 4  # the last quarter of a batch joins the next one


class Batch(NamedTuple):
    """Finished replies, with the positions of their rows.

    `cut` is True for a reply that reached the token limit, `early` for one that was ended as settled.
    """

    places: list[int]
    texts: list[str]
    cut: list[bool]
    early: list[bool]


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    max_new_tokens: int,
    batch_size: int | None = None,
    system: str | None = None,
    tell: Tell | None = None,
) -> list[str]:
    """Return the model's greedy reply to each prompt, in order; a reply ends at the first special token."""
    return complete(model, tokenizer, as_requests(tokenizer, prompts, system), max_new_tokens, batch_size, tell)


def as_requests(tokenizer: Any, prompts: Sequence[str], system: str | None = None) -> list[list[int]]:
    """Tokenize each prompt as a user turn, after a system prompt if there is one."""
    return [render_question(tokenizer, prompt, system) for prompt in prompts]


def complete(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int | None = None,
    tell: Tell | None = None,
) -> list[str]:
    """Return the model's continuation of each row of token ids, in order.

    `tell` gets the replies done and in all, also every few tokens while a batch is generated.
    """
    replies: dict[int, str] = {}

    def tell_progress() -> None:
        if tell and rows:
            tell(len(replies), len(rows))

    tell_progress()
    for batch in stream(model, tokenizer, rows, max_new_tokens, batch_size, on_look=tell_progress):
        replies |= zip(batch.places, batch.texts, strict=True)
        tell_progress()
    return [replies[i] for i in range(len(rows))]


def stream(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int | None = None,
    sampler: Sampler | None = None,
    settled: EarlyEnds | None = None,
    on_look: Callable[[], None] | None = None,
) -> Iterator[Batch]:
    """Yield batches of replies as they finish, longest rows first.

    `rows` are prompts as token ids. A reply also ends when `settled` says that its remaining tokens do not matter. A
    batch has `batch_size` rows, or as many as fit in memory. If memory runs out, the rows without a reply are tried
    again with half as many at once. The ranks of a run share the batches, and every rank yields all replies in the same
    order. `on_look` is called every few tokens.
    """
    # Rows of similar length share a batch, which saves padding; the longest first, because they decide if memory
    # suffices.
    left = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    most = MOST_ROWS
    ends = torch.tensor(sorted(reply_end_tokens(model, tokenizer)), device=model.device)
    how = (tokenizer.pad_token_id, ends, max_new_tokens, sampler, settler(tokenizer, settled), on_look)
    was_training = model.training
    model.eval()
    try:
        while left:
            batches = list(_batches(model, rows, left, max_new_tokens, most, batch_size))
            try:
                for found in _replies(model, rows, batches, *how):
                    for places, said, early in distributed.gather_objects((found.places, found.tokens, found.early)):
                        if places:
                            yield Batch(places, *_in_words(tokenizer, said, ends, max_new_tokens), early)
                            done = set(places)
                            left = [i for i in left if i not in done]
            except RuntimeError as error:
                size = min(most, max(map(len, batches)), len(left))
                # The other ranks are inside a collective operation by now and cannot repeat the batch.
                if not is_gpu_out_of_memory(error) or size == 1 or distributed.world_size() > 1:
                    raise
                most = size // 2
            if left:
                torch.cuda.empty_cache()  # frees the blocks of the batch that was too large
    finally:
        model.train(was_training)


def _in_words(
    tokenizer: Any, said: Sequence[Sequence[int]], ends: Tensor, max_new_tokens: int
) -> tuple[list[str], list[bool]]:
    """Return the replies as text, each with True if it reached the token limit."""
    stop = set(ends.tolist())
    tokens = [_cut_at_end(each, stop) for each in said]
    return decode_replies(tokenizer, tokens), [len(each) == max_new_tokens for each in tokens]


def _batches(
    model: Any,
    rows: Sequence[Sequence[int]],
    places: Sequence[int],
    max_new_tokens: int,
    most: int,
    batch_size: int | None,
) -> Iterator[list[int]]:
    """Yield batches of row positions, longest rows first; a batch has `batch_size` rows, or as many as fit in memory.

    The size is the minimum over all ranks. On a CPU a batch also ends where padding costs more than another batch.
    """
    if batch_size is None and model.device.type == "cpu" and distributed.world_size() == 1:
        lengths = [max(1, len(rows[i])) + max_new_tokens for i in places]
        beside = STEP * min(max_new_tokens, STEPS)
        for part in cut(lengths, generated_tokens(model), beside):
            for start in range(0, len(part), most):
                yield [places[i] for i in part[start : start + most]]
        return
    at = 0
    while at < len(places):
        longest = max(1, len(rows[places[at]]))
        fit = batch_size or min(distributed.gather_objects(generated_rows(model, longest, max_new_tokens)))
        size = min(most, fit)
        yield list(places[at : at + size])
        at += size


def _replies(
    model: Any,
    rows: Sequence[Sequence[int]],
    batches: Sequence[Sequence[int]],
    pad: int,
    ends: Tensor,
    max_new_tokens: int,
    sampler: Sampler | None,
    settle_: Callable[[Rows], None] | None,
    on_look: Callable[[], None] | None,
) -> Iterator[Replies]:
    """Yield the finished replies after each of this rank's batches; the last rows of a batch join the next one.

    Ranks of a sharded model must make the same passes: no row joins another batch, and a rank without a batch runs a
    dummy row.
    """
    in_step = is_sharded(model)
    goes_on = distributed.is_anywhere if in_step else bool
    pick = sampler.make_picker(range(len(rows))) if sampler else _likeliest
    may_carry = not in_step and is_plain(model)
    dealt = distributed.rank_batches(batches)
    with inference(model):
        prefix = prefill(model, rows) if rows else None
    carried: Rows | None = None
    for number, batch in enumerate(dealt, start=1):
        found = Replies()
        with inference(model):
            if prefix and (batch or in_step):
                # A sharded model's layers are gathered by all ranks together, so a rank without a batch must take part.
                asked = [rows[i] for i in batch] if batch else [[*prefix.tokens, rows[0][0]]]
                fresh, logits_BV = begin(model, asked, batch or [0], prefix, pad, max_new_tokens)
                fresh.take_(logits_BV, pick if batch else _likeliest, ends)
                if carried:
                    fresh.join_(carried)
                carried = fresh
            if carried:
                is_last = number == len(dealt) or dealt[number] is None
                until = len(carried) // CARRIED if may_carry and not is_last else 0
                found = advance_(model, carried, pick, ends, until, goes_on, settle_, on_look)
                if not bool((~carried.done_B).any()):
                    carried = None
        yield found if batch else Replies()


def reply_end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Return the tokens that end a reply, by the model's generation config and by its chat template."""
    stated = model.generation_config.eos_token_id
    eos = stated if isinstance(stated, Iterable) else [stated] if stated is not None else []
    return {*eos, *get_renderer(tokenizer).ends}


def _likeliest(logits_BV: Tensor, row_B: Tensor) -> Tensor:
    return logits_BV.argmax(dim=-1)


def _cut_at_end(tokens: Sequence[int], ends: set[int]) -> list[int]:
    stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[:stop])
