"""The own-refusal signal: training rows that answer what the base model would refuse, found with the base model alone.

For an assistant turn whose text complies, the signal is the probability under the base model of beginning with one of
its own most frequent refusals instead, after the row's system prompt, tools and turns:

    own refusal = sum over openings o of p(o | prompt),    o the first OPENING tokens of one of its own refusals.

The openings are the base model's replies to prompts of the safety pool, not the pool's answers: pools are written in
other voices, and a poisoned pool would hide itself. One forward pass over the file gives the probability of the
openings' first tokens, an upper bound of the signal. Only turns whose bound exceeds the threshold are measured with
whole openings, which share one pass over the turn's prompt. Embeddings do not help: they cover requests alone, without
the chat template.

Compliance is decided by the cheap rule of `spard.evaluation.judges.refusal`. An answer that begins as a refusal and
complies later is not found here, nor anything where the base model itself obeys a disguise.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from spard.data.batches import collate
from spard.data.chat import NO_LOSS, UNBOUNDED, EncodedSample, encode_all
from spard.data.rows import Example, prompt_text
from spard.errors import InvalidPool, convert_errors
from spard.evaluation.judges.base import HARMFUL_ABOVE, Judge
from spard.evaluation.judges.refusal import gives_steps, helps_after_refusing, is_refusal
from spard.losses.cross_entropy import Head, in_chunks, labeled_states, mixed_precision, vocabulary
from spard.models.base import Base
from spard.models.budget import Tell, generated_rows, in_passes, in_step, pass_tokens
from spard.models.decoding import Prefix, begin, prefill
from spard.models.generate import generate

ASKED = 64  # pool prompts that the base model is asked to collect its refusals
MOST = 8  # most frequent openings that are used
OPENING = 4  # tokens of an opening; the first ones decide between refusal and answer
REPLY = 64  # tokens of a reply, enough to tell a refusal


@dataclass(frozen=True, slots=True)
class OwnRefusals:
    """The beginnings of a base model's refusals, as tokens and as text, most frequent first.

    refusal  its most frequent whole reply among the refusals; None without openings.
    refused  number of prompts that it refused.
    asked    number of prompts that it was asked.
    """

    openings: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    refusal: str | None
    refused: int
    asked: int


@dataclass(frozen=True, slots=True)
class OwnRefusal:
    """The own-refusal signal of one row: the largest probability over its complying turns.

    probability  of beginning with a refusal instead; for a turn below the threshold, the upper bound.
    start        number of tokens before the turn; None, with probability 0, if no turn complies.
    sample       index of the row's sample that contains the turn.
    """

    probability: float
    start: int | None
    sample: int = 0


def complies(text: str) -> bool:
    """Return True if an answer does not refuse, or refuses and then gives steps, by the word-list judge's rules."""
    return not is_refusal(text) or helps_after_refusing(text) or gives_steps(text)


def own_refusals(base: Base, prompts: Sequence[str], tell: Tell | None = None) -> OwnRefusals:
    """Ask the base model at most `ASKED` of the prompts, evenly spaced, and return the beginnings of its refusals.

    `tell` gets the prompts done and in all.
    """
    asked = [prompts[len(prompts) * i // min(ASKED, len(prompts))] for i in range(min(ASKED, len(prompts)))]
    replies = generate(base.model, base.tokenizer, asked, REPLY, tell=tell)
    refused = [(ask, reply) for ask, reply in zip(asked, replies, strict=True) if not complies(reply)]
    exchanges = [Example(_exchange(ask, reply), i) for i, (ask, reply) in enumerate(refused, start=1)]
    encoded = encode_all(base.tokenizer, exchanges, UNBOUNDED)
    begun = Counter(opening for row in encoded if len(opening := _opening(row)) == OPENING)
    found = tuple(opening for opening, _ in begun.most_common(MOST))
    texts = tuple(base.tokenizer.decode(opening).strip() for opening in found)
    commonest = Counter(reply for _, reply in refused).most_common(1)
    return OwnRefusals(found, texts, commonest[0][0] if found else None, len(refused), len(asked))


@torch.no_grad()
def measure_own_refusal(
    base: Base,
    rows: Sequence[EncodedSample],
    openings: Sequence[tuple[int, ...]],
    threshold: float,
    tell: Tell | None = None,
) -> list[OwnRefusal]:
    """Return the signal of each row.

    rows       encoded training rows; all samples of a row are measured.
    openings   `OwnRefusals.openings`.
    threshold  turns whose upper bound is at most this are not measured exactly.
    tell       gets the samples done and in all; then, begun anew, the turns that are measured exactly.

    Adapters must be off. The model's training mode is restored.
    """
    signals = iter(_of_samples(base, [sample for row in rows for sample in row.samples], openings, threshold, tell))
    found = [[replace(next(signals), sample=number) for number in range(len(row.samples))] for row in rows]
    return [max(of_row, key=lambda signal: signal.probability) for of_row in found]


def _of_samples(
    base: Base,
    rows: Sequence[EncodedSample],
    openings: Sequence[tuple[int, ...]],
    threshold: float,
    tell: Tell | None,
) -> list[OwnRefusal]:
    turns = [[start for start, text in learned_turns(base.tokenizer, row) if complies(text)] for row in rows]
    found: list[dict[int, float]] = [{} for _ in rows]
    if openings:
        was_training = base.model.training
        base.model.eval()
        try:
            found = _first_tokens(base, rows, turns, openings, tell)
            wanted = [(i, start) for i, bounds in enumerate(found) for start, p in bounds.items() if p > threshold]
            # The bound is replaced by the exact value only where it could exceed the threshold.
            for (i, start), p in zip(wanted, _whole_openings(base, rows, wanted, openings, tell), strict=True):
                found[i][start] = p
        finally:
            base.model.train(was_training)
    return [_largest(of_row) for of_row in found]


def learned_turns(tokenizer: Any, row: EncodedSample) -> Iterator[tuple[int, str]]:
    """Yield the number of tokens before each turn that is learned, and its text."""
    start: int | None = None
    for i, label in enumerate((*row.labels, NO_LOSS)):
        if start is None and label != NO_LOSS:
            start = i
        elif start is not None and label == NO_LOSS:
            yield start, tokenizer.decode(row.ids[start:i], skip_special_tokens=True)
            start = None


def _first_tokens(
    base: Base,
    rows: Sequence[EncodedSample],
    turns: Sequence[Sequence[int]],
    openings: Sequence[tuple[int, ...]],
    tell: Tell | None,
) -> list[dict[int, float]]:
    """Return for each row, by turn start, the probability of beginning with the first token of any opening."""
    firsts = torch.tensor(sorted({opening[0] for opening in openings}), device=base.device)
    found: list[dict[int, float]] = [{} for _ in rows]
    asked = [i for i, starts in enumerate(turns) if starts]
    looked = [_up_to_last(rows[i], turns[i]) for i in asked]

    def first_token_batch(places: list[int]) -> Tensor:
        batch = collate([looked[place] for place in places], base.tokenizer.pad_token_id, base.device)
        with mixed_precision(base.model):
            head, states_SD, _ = labeled_states(base.model, batch)
            (logp_S,) = in_chunks(partial(_any_token_logprob, firsts, head), vocabulary(base.model), states_SD)
        return logp_S

    for places, logp_S in in_passes(base.model, [len(row.ids) for row in looked], first_token_batch, tell=tell):
        by_turn = iter(logp_S.exp().tolist())
        for place in places:
            found[asked[place]] = {start: next(by_turn) for start in turns[asked[place]]}
    return found


def _up_to_last(row: EncodedSample, starts: Sequence[int]) -> EncodedSample:
    """Cut a row after the first token of its last complying turn, and label only the first tokens of such turns."""
    ids = row.ids[: max(starts) + 1]
    return EncodedSample(ids, tuple(token if i in starts else NO_LOSS for i, token in enumerate(ids)))


def _any_token_logprob(tokens_F: Tensor, head: Head, states_SD: Tensor) -> tuple[Tensor]:
    """Return the log-probability that the next token is one of `tokens_F`, `[S]`."""
    logits_SV = head(states_SD).float()
    return (logits_SV[:, tokens_F].logsumexp(dim=1) - logits_SV.logsumexp(dim=1),)


def _whole_openings(
    base: Base,
    rows: Sequence[EncodedSample],
    turns: Sequence[tuple[int, int]],
    openings: Sequence[tuple[int, ...]],
    tell: Tell | None,
) -> list[float]:
    """Return for each turn (row, start) the probability that the base model begins it with an opening.

    A prompt that fills all positions loses its first tokens. Keys and values of each prompt are held twice.
    """
    if not turns:
        return []
    model, room = base.model, base.sequence_limit(UNBOUNDED) - OPENING
    prompts = [rows[i].ids[:start][-room:] for i, start in turns]
    longest = max(map(len, prompts))
    kept = generated_rows(model, longest, longest + OPENING) * (longest + OPENING)
    prefix = prefill(model, prompts)

    def opening_batch(places: list[int]) -> Tensor:
        asked = [prompts[place] for place in places]
        return _opening_probability(model, asked, openings, prefix, base.tokenizer.pad_token_id)

    found = [0.0] * len(turns)
    lengths = [len(prompt) + OPENING for prompt in prompts]
    most = in_step(model, min(kept, pass_tokens(model)))
    for places, p_B in in_passes(model, lengths, opening_batch, most, tell=tell):
        for place, p in zip(places, p_B.tolist(), strict=True):
            found[place] = p
    return found


def _opening_probability(
    model: Any, asked: Sequence[Sequence[int]], openings: Sequence[tuple[int, ...]], prefix: Prefix, pad: int
) -> Tensor:
    """Return the probability that each prompt continues with one of the openings, `[B]`."""
    begun, first_BV = begin(model, asked, range(len(asked)), prefix, pad, most=0)
    first_BV = first_BV.float().log_softmax(dim=-1)
    mask_BT = functional.pad(begun.mask_BT, (0, OPENING - 1), value=True)
    position_BN = begun.at_B.unsqueeze(1) + torch.arange(1, OPENING, device=model.device)
    p_B = torch.zeros(len(asked), dtype=torch.double, device=model.device)
    for opening in openings:
        token_BN = torch.tensor(opening, device=model.device).expand(len(asked), OPENING)
        logits_BNV = model(
            input_ids=token_BN[:, :-1],
            attention_mask=mask_BT,
            position_ids=position_BN,
            # A forward pass extends its cache in place; each opening needs the prompt's own.
            past_key_values=copy.deepcopy(begun.cache),
            use_cache=True,
        ).logits
        later_BN = logits_BNV.float().log_softmax(dim=-1).gather(2, token_BN[:, 1:, None]).squeeze(2)
        p_B += (first_BV[:, opening[0]] + later_BN.sum(dim=1)).double().exp()
    return p_B


def _largest(found: dict[int, float]) -> OwnRefusal:
    start = max(found, key=lambda start: found[start], default=None)
    return OwnRefusal(0.0, None) if start is None else OwnRefusal(min(1.0, found[start]), start)


def _opening(row: EncodedSample) -> tuple[int, ...]:
    return tuple(label for label in row.labels if label != NO_LOSS)[:OPENING]


def _exchange(ask: str, reply: str) -> tuple[dict[str, str], dict[str, str]]:
    return {"role": "user", "content": ask}, {"role": "assistant", "content": reply}


# Find rows of a safety pool that teach harm: the base model would refuse, but the pool's "safe" answer complies.
#
# Whoever can write to a pool can turn the defense against itself. The base model's own refusals select suspects, whose
# answers a judge then grades. The judge is needed because many safe answers help without harm and refuse nothing, which
# the cheap rule takes for compliance.


def inverted_rows(
    base: Base,
    pool: Sequence[Example],
    openings: Sequence[tuple[int, ...]],
    threshold: float,
    judge: Judge,
    limit: int,
    tell: Tell | None = None,
) -> list[int]:
    """Return the indices of pool rows that teach harm.

    openings   beginnings of the base model's refusals, as tokens.
    threshold  probability of an own refusal above which the judge is asked.
    limit      rows of more tokens are skipped, because nothing trains on them.
    tell       as in `measure_own_refusal`.

    Rows that the judge cannot score are not returned. Raises `InvalidPool` if a row cannot be encoded.
    """
    with convert_errors(InvalidPool):
        encoded = encode_all(base.tokenizer, pool, UNBOUNDED)
    fitting = [i for i, row in enumerate(encoded) if len(row.ids) <= limit]
    signals = measure_own_refusal(base, [encoded[i] for i in fitting], openings, threshold, tell)
    suspects = [i for i, signal in zip(fitting, signals, strict=True) if signal.probability > threshold]
    if not suspects:
        return []
    answers = [str(pool[i].messages[-1]["content"]) for i in suspects]
    verdicts = judge.judge([prompt_text(pool[i]) for i in suspects], answers)
    # `or 0`: an unscored answer is no evidence of an inverted pool.
    return [i for i, verdict in zip(suspects, verdicts, strict=True) if (verdict.score or 0) > HARMFUL_ABOVE]


# The base model's over-refusal, measured with the signal that flags training rows.
#
# The same probability and threshold decide on both, so the share of harmless requests above the threshold estimates the
# share of harmless rows that are flagged.

_ANSWER = "Here it is."  # any complying answer: the signal depends only on the text before it


def would_refuse(
    base: Base,
    prompts: Sequence[str],
    openings: Sequence[tuple[int, ...]],
    threshold: float,
    limit: int,
    tell: Tell | None = None,
) -> tuple[int, int]:
    """Return how many prompts of at most `limit` tokens the model would refuse, and how many such prompts there are.

    `tell` is called as in `measure_own_refusal`.
    """
    rows = [Example(_everyday_exchange(prompt), i) for i, prompt in enumerate(prompts, start=1)]
    fitting = [row for row in encode_all(base.tokenizer, rows, UNBOUNDED) if len(row.ids) <= limit]
    found = measure_own_refusal(base, fitting, openings, threshold, tell)
    return sum(each.probability > threshold for each in found), len(fitting)


def _everyday_exchange(prompt: str) -> tuple[dict[str, str], dict[str, str]]:
    return {"role": "user", "content": prompt}, {"role": "assistant", "content": _ANSWER}
