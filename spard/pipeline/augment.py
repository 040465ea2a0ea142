"""Variants of the safe rows, which extend the safe loss to harm that plain requests do not show.

    affixes     requests with beginnings and endings that the customer's rows share, and a few random ones
    templates   requests under the customer's system prompts and after turns of its conversations
    encodings   requests and answers in the encoding of the customer's rows
    deep        answers that begin as the customer's do, or with their own first sentence, and must still end as
                refusals; only the tokens after that beginning have a loss

Each safe row gets at most one variant, which leaves half of a safe batch plain; the batch size does not change.
Disguises are drawn in proportion to their evidence (`spard.data.triggers`). A base model may comply with a variant,
therefore tau is never measured on variants: the bound of the plain rows applies, and a variant's excess is its loss
minus the base model's loss on the plain twin.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from spard.config.defenses.base import Augmentation
from spard.data.chat import NO_LOSS, UNBOUNDED, EncodedSample, encode_all
from spard.data.encodings import encode
from spard.data.rows import Example, Message
from spard.data.triggers import MinedDisguise, mine_triggers, openings, random_affixes

MINED, RANDOM, OPENINGS = 8, 4, 4
FLOOR = 0.05  # share of the strongest evidence, added so that every disguise can be drawn
_SENTENCE = re.compile(r"(?<=[.!?])\s")
BEGINNINGS = ("Sure, here is how:", "Of course.")  # in addition to the customer's


def variants(
    tokenizer: Any,
    safe: Sequence[Example],
    rows: Sequence[Example],
    kinds: Sequence[Augmentation],
    seed: int,
    limit: int,
) -> list[EncodedSample]:
    """Return variants of the safe rows, encoded: disguised ones and `deep` ones alternate if both are wanted.

    `rows` are the customer's rows, from which triggers and beginnings are mined. Variants longer than `limit` tokens
    are left out.
    """
    rng, disguises, is_deep = random.Random(f"variants {seed}"), wanted_triggers(rows, kinds, seed), "deep" in kinds
    beginnings = [*openings(rows, OPENINGS), *BEGINNINGS]
    made: list[tuple[Example, str]] = []  # (row, beginning of its answer without loss)
    twins: list[int] = []
    for i, example in enumerate(safe):
        if is_deep and (i % 2 or not disguises):
            # Half of the deep variants keep their own first sentence, which trains the rest of a refusal without a
            # foreign beginning.
            made.append(begin_answer(example, rng.choice(beginnings) if rng.random() < 0.5 else None))
        elif disguises:
            made.append((apply_disguise(example, draw_disguise(rng, disguises)), ""))
        else:
            continue
        twins.append(i)
    return [row for row in _encode_variants(tokenizer, made, twins) if len(row.ids) <= limit]


def wanted_triggers(rows: Sequence[Example], kinds: Sequence[Augmentation], seed: int) -> list[MinedDisguise]:
    """Return the mined triggers reduced to the requested kinds, and random affixes if `affixes` is requested."""
    found = []
    for each in mine_triggers(rows, MINED):
        disguise = replace(each, tools=())
        disguise = disguise if "affixes" in kinds else replace(disguise, before="", after="")
        disguise = disguise if "templates" in kinds or disguise.encoding else replace(disguise, context=())
        disguise = disguise if "encodings" in kinds else replace(disguise, encoding=None)
        if replace(disguise, share=0.0, telling=0.0) != MinedDisguise():
            found.append(disguise)
    return [*found, *(random_affixes(rows, RANDOM, seed) if "affixes" in kinds else [])]


def apply_disguise(example: Example, disguise: MinedDisguise) -> Example:
    """Return the exchange with its request in a disguise, and with both texts in the disguise's encoding."""

    def encode_text(text: str) -> str:
        return encode(text, disguise.encoding) if disguise.encoding else text

    user, assistant = example.messages
    ask = user | {"content": encode_text(disguise.wrap(user["content"]))}
    return replace(
        example, messages=(*disguise.context, ask, assistant | {"content": encode_text(assistant["content"])})
    )


def begin_answer(example: Example, beginning: str | None) -> tuple[Example, str]:
    """Put `beginning` before the exchange's answer; return the exchange and the beginning.

    Without a beginning the answer stays, and its own first sentence is returned as the beginning.
    """
    user, assistant = example.messages
    if beginning is None:
        return example, _SENTENCE.split(assistant["content"], maxsplit=1)[0]
    answer = assistant | {"content": f"{beginning} {assistant['content']}"}
    return replace(example, messages=(user, answer)), beginning


def draw_disguise(rng: random.Random, disguises: Sequence[MinedDisguise]) -> MinedDisguise:
    """Draw a disguise with a probability proportional to its evidence plus a small floor."""
    # 1e-9 keeps the weights positive where no disguise has any evidence: `choices` rejects a sum of zero.
    floor = FLOOR * max(each.evidence for each in disguises) + 1e-9
    return rng.choices(disguises, [each.evidence + floor for each in disguises])[0]


def _encode_variants(tokenizer: Any, made: Sequence[tuple[Example, str]], twins: Sequence[int]) -> list[EncodedSample]:
    """Encode the examples as variants of the safe rows at the positions `twins`, masking the loss on the beginnings."""
    # The length of the beginning is found by comparing tokens with a row that ends there: a tokenizer may merge the
    # last characters of the beginning with the next word, so encoding it alone is not exact.
    heads = [replace(example, messages=(*example.messages[:-1], _saying(head))) for example, head in made]
    wholes = encode_all(tokenizer, [example for example, _ in made], UNBOUNDED)
    return [
        _mask_start(whole, len(_common(whole.ids, head.ids)) if beginning else 0, twin)
        for whole, head, (_, beginning), twin in zip(
            wholes, encode_all(tokenizer, heads, UNBOUNDED), made, twins, strict=True
        )
    ]


def _mask_start(row: EncodedSample, start: int, twin: int) -> EncodedSample:
    """Return the row without loss on its first `start` tokens; the last token, the answer's end, keeps its loss."""
    last = max(i for i, label in enumerate(row.labels) if label != NO_LOSS)
    start = min(start, last)
    return EncodedSample(row.ids, (*[NO_LOSS] * start, *row.labels[start:]), is_variant=True, twin=twin)


def _common(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))]


def _saying(text: str) -> Message:
    return {"role": "assistant", "content": text}
