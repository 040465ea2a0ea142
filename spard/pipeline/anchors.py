"""The prompt pairs that the anchor holds beside the plain safe prompts: framed, disguised, benign, with a begun answer.

A framed prompt gets the system prompt of a randomly drawn training row, because requests to the tuned model will have
one; this needs enough rows with a system prompt. A disguised prompt appears in `DRESSES` different disguises. Mined
disguises are the affixes and templates of `spard.pipeline.augment`, drawn in proportion to their evidence; the others
are random words at random positions (`spard.data.disguises`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spard.config import Anchors
from spard.config.anchors import Kind
from spard.data.chat import Encoded, render_question
from spard.data.disguises import disguise_maker
from spard.data.encodings import detect_encoding
from spard.data.rows import Example, Message, prompt_text
from spard.data.triggers import Wrapping, enough
from spard.data.turns import last_answer, last_request, system_prompt
from spard.losses.anchor import Pair, unlabeled_prompt
from spard.pipeline.augment import draw_disguise, wanted_triggers
from spard.pipeline.begun_answers import begun_pairs

DRESSES = 4

Disguise = Callable[[], Wrapping]


def make_anchor_pairs(
    tokenizer: Any,
    safe: Sequence[Example],
    benign: Sequence[Example],
    rows: Sequence[Example],
    settings: Anchors,
    seed: int,
    limit: int,
    replies: Sequence[str] = (),
) -> dict[Kind, list[Pair]]:
    """Return the anchor's pairs of prompts (asked, reference) for each kind in the settings.

    The anchor pulls the hidden state of the asked prompt to the base model's state on the reference. `safe` and
    `benign` are the selected rows of the pool, `rows` the customer's training rows, and `replies` the base model's
    answers to benign rows (`spard.pipeline.begun_answers`). Pairs whose asked prompt has more than `limit` tokens are
    left out.
    """
    found: dict[Kind, list[Pair]] = {}
    by_kind = settings.by_kind()
    if by_kind["safe"][0] and (framed := _framed_pairs(tokenizer, safe, rows, seed)):
        found["safe"] = framed
    sides: Mapping[Kind, Sequence[Example]] = {"dressed_safe": safe, "dressed_benign": benign}
    if by_kind["benign"][0]:
        found["benign"] = _plain(tokenizer, benign)
    for kind, side in sides.items():
        if by_kind[kind][0]:
            found[kind] = _disguised_pairs(tokenizer, side, _disguises(rows, settings, seed, kind))
    found |= begun_pairs(tokenizer, safe, benign, replies, settings, seed)
    return {kind: [pair for pair in pairs if len(pair.asked.ids) <= limit] for kind, pairs in found.items()}


def _disguises(rows: Sequence[Example], settings: Anchors, seed: int, kind: Kind) -> Disguise:
    """Return a function that draws a disguise: a random one with probability `random_dresses`, else a mined one."""
    # Each kind has its own random stream: adding a kind does not change the draws of the others.
    rng = random.Random(f"{kind} {seed}")
    at_random = disguise_maker(rows, rng)
    mined = wanted_triggers(rows, ("affixes", "templates"), seed)

    def draw() -> Wrapping:
        return at_random() if not mined or rng.random() < settings.random_dresses else draw_disguise(rng, mined)

    return draw


def _framed_pairs(tokenizer: Any, safe: Sequence[Example], rows: Sequence[Example], seed: int) -> list[Pair]:
    """Pair each safe prompt, under the system prompt of a random training row, with its plain form.

    Returns an empty list if too few rows have a system prompt. Rows in an encoding are not used.
    """
    rng, contexts = random.Random(f"frames {seed}"), [found for found in map(_system_of_plain, rows) if found]
    if len(contexts) < enough(rows):
        return []
    return [
        Pair(_prompt(tokenizer, prompt_text(example), Wrapping(rng.choice(contexts))), plain.kept)
        for example, plain in zip(safe, _plain(tokenizer, safe), strict=True)
    ]


def _system_of_plain(row: Example) -> tuple[Message, ...]:
    system = system_prompt(row)
    return () if system and (detect_encoding(last_request(row)) or detect_encoding(last_answer(row))) else system


def _plain(tokenizer: Any, examples: Sequence[Example]) -> list[Pair]:
    prompts = [_prompt(tokenizer, prompt_text(example), Wrapping()) for example in examples]
    return [Pair(prompt, prompt) for prompt in prompts]


def _disguised_pairs(tokenizer: Any, examples: Sequence[Example], draw: Disguise) -> list[Pair]:
    texts = [prompt_text(example) for example in examples]
    kept = [_prompt(tokenizer, text, Wrapping()) for text in texts]
    return [
        Pair(_prompt(tokenizer, text, draw()), plain)
        for _ in range(DRESSES)
        for text, plain in zip(texts, kept, strict=True)
    ]


def _prompt(tokenizer: Any, text: str, disguise: Wrapping) -> Encoded:
    """Tokenize a disguised request; a lone system prompt goes to the system slot of the model's chat template."""
    # `render_question` can merge a lone system prompt into the request for templates without a system role.
    system = (
        disguise.context[0]["content"]
        if len(disguise.context) == 1 and disguise.context[0]["role"] == "system"
        else None
    )
    context = () if system is not None else disguise.context
    return unlabeled_prompt(render_question(tokenizer, disguise.wrap(text), system, context))
