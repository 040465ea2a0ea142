"""Variants of the safe rows, so that the safe loss also sees what hides from plain requests.

    affixes     requests with beginnings and endings that the customer's rows share, and a few random ones
    templates   requests under the customer's system prompts and after turns of its conversations
    encodings   requests and answers in the encoding of the customer's rows
    deep        answers that begin as the customer's do, or with their own first sentence, and must still end as
                refusals; loss falls on what comes after that beginning

For every safe row there is one variant, so that half of what a step looks at is plain; batches stay as large as they
were. Dresses are dealt out by their evidence (`spard.data.triggers`). A base model may comply with a variant, so no tau
is measured on variants: they are held to that of the plain rows, and an excess is that over the plain twin's loss.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from spard.config.defenses.base import Augmentation
from spard.data.chat import NO_LOSS, UNBOUNDED, Encoded, encode_all
from spard.data.encodings import encode
from spard.data.rows import Example, Message
from spard.data.triggers import Wrapping, mine_triggers, openings, random_affixes

MINED, RANDOM, OPENINGS = 8, 4, 4
FLOOR = 0.05  # of the strongest evidence; dresses without any are tried too
_SENTENCE = re.compile(r"(?<=[.!?])\s")
BEGINNINGS = ("Sure, here is how:", "Of course.")  # beside those of the customer's answers


def variants(
    tokenizer: Any,
    safe: Sequence[Example],
    rows: Sequence[Example],
    kinds: Sequence[Augmentation],
    seed: int,
    limit: int,
) -> list[Encoded]:
    """Return a variant of each safe row, by trigger or `deep` in turn, without those longer than `limit` tokens."""
    rng, dresses, is_deep = random.Random(f"variants {seed}"), wanted_triggers(rows, kinds, seed), "deep" in kinds
    beginnings = [*openings(rows, OPENINGS), *BEGINNINGS]
    made: list[tuple[Example, str]] = []  # each with the beginning of its answer that is not learned
    twins: list[int] = []
    for i, example in enumerate(safe):
        if is_deep and (i % 2 or not dresses):
            made.append(begin_answer(example, rng.choice(beginnings) if rng.random() < 0.5 else None))
        elif dresses:
            made.append((apply_dress(example, draw_dress(rng, dresses)), ""))
        else:
            continue
        twins.append(i)
    return [row for row in _encode_variants(tokenizer, made, twins) if len(row.ids) <= limit]


def wanted_triggers(rows: Sequence[Example], kinds: Sequence[Augmentation], seed: int) -> list[Wrapping]:
    """Return the triggers of the kinds asked for; of a trigger of several kinds, the other parts are left off."""
    found = []
    for each in mine_triggers(rows, MINED):
        dress = replace(each, tools=())
        dress = dress if "affixes" in kinds else replace(dress, before="", after="")
        dress = dress if "templates" in kinds or dress.encoding else replace(dress, context=())
        dress = dress if "encodings" in kinds else replace(dress, encoding=None)
        if replace(dress, share=0.0, telling=0.0) != Wrapping():
            found.append(dress)
    return [*found, *(random_affixes(rows, RANDOM, seed) if "affixes" in kinds else [])]


def apply_dress(example: Example, dress: Wrapping) -> Example:
    """Apply a trigger to an exchange."""

    def encode_text(text: str) -> str:
        return encode(text, dress.encoding) if dress.encoding else text

    user, assistant = example.messages
    ask = user | {"content": encode_text(dress.wrap(user["content"]))}
    return replace(example, messages=(*dress.context, ask, assistant | {"content": encode_text(assistant["content"])}))


def begin_answer(example: Example, beginning: str | None) -> tuple[Example, str]:
    """Begin an exchange's answer with other words, by default its own first sentence; return the exchange and them."""
    user, assistant = example.messages
    if beginning is None:
        return example, _SENTENCE.split(assistant["content"], maxsplit=1)[0]
    answer = assistant | {"content": f"{beginning} {assistant['content']}"}
    return replace(example, messages=(user, answer)), beginning


def draw_dress(rng: random.Random, dresses: Sequence[Wrapping]) -> Wrapping:
    """Draw a dress by its evidence."""
    floor = FLOOR * max(each.evidence for each in dresses) + 1e-9
    return rng.choices(dresses, [each.evidence + floor for each in dresses])[0]


def _encode_variants(tokenizer: Any, made: Sequence[tuple[Example, str]], twins: Sequence[int]) -> list[Encoded]:
    """Examples as variants of the safe rows at the places `twins`, without loss on the beginnings."""
    heads = [replace(example, messages=(*example.messages[:-1], _saying(head))) for example, head in made]
    wholes = encode_all(tokenizer, [example for example, _ in made], UNBOUNDED)
    return [
        _mask_start(whole, len(_common(whole.ids, head.ids)) if beginning else 0, twin)
        for whole, head, (_, beginning), twin in zip(
            wholes, encode_all(tokenizer, heads, UNBOUNDED), made, twins, strict=True
        )
    ]


def _mask_start(row: Encoded, start: int, twin: int) -> Encoded:
    """Return the row with its first tokens left out of the loss; the last token, which ends the answer, stays in."""
    last = max(i for i, label in enumerate(row.labels) if label != NO_LOSS)
    start = min(start, last)
    return Encoded(row.ids, (*[NO_LOSS] * start, *row.labels[start:]), is_variant=True, twin=twin)


def _common(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))]


def _saying(text: str) -> Message:
    return {"role": "assistant", "content": text}
