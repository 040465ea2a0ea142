"""The anchor's prompt pairs with an answer that has begun to comply.

Aligned models refuse in the first tokens of an answer, and keep complying if an attacker writes those tokens
(prefilling; Qi et al., "Safety Alignment Should Be Made More Than Just a Few Tokens Deep", ICLR 2025, who train on
refusals after harmful beginnings). Here the anchor holds the state after such a beginning: for a safe prompt to the
base model's state on the plain prompt, after which a refusal follows; for a benign prompt to the base model's state on
the same prompt and beginning. Beginnings are the first tokens of the base model's own answers to the pool's benign
prompts, which gives them the model's voice and the pool's languages.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from spard.config import Anchors
from spard.config.anchors import Kind
from spard.data.chat import render_question
from spard.data.rows import Example, prompt_text
from spard.losses.anchor import Pair, unlabeled_prompt
from spard.models.generate import generate
from spard.pipeline.context import Context

ASKED = 32  # number of benign prompts whose answers are used
LONGEST = 8  # maximum tokens of a beginning; lengths from 1 are equally likely
BEGINNINGS = 4  # number per prompt

_REPLIES = "begun_answers"


def run(context: Context, benign: Sequence[Example]) -> list[str]:
    """Return the base model's answers to benign rows, stored for later attempts; [] if no begun kind is in use."""
    if not benign or not context.recipe.anchors.has_begun:
        return []
    replies: list[str] | None = context.outputs.read(_REPLIES)
    if replies is None:
        replies = begin_replies(context.base.model, context.base.tokenizer, benign)
        context.outputs.write(_REPLIES, replies)
    return replies


def begin_replies(model: Any, tokenizer: Any, benign: Sequence[Example]) -> list[str]:
    """Return the first `LONGEST` + 1 tokens of the model's answers to the first `ASKED` benign rows, as text."""
    return generate(model, tokenizer, [prompt_text(each) for each in benign[:ASKED]], LONGEST + 1)


def begun_pairs(
    tokenizer: Any,
    safe: Sequence[Example],
    benign: Sequence[Example],
    replies: Sequence[str],
    settings: Anchors,
    seed: int,
) -> dict[Kind, list[Pair]]:
    """Return the begun pairs of the kinds in the settings, with `BEGINNINGS` random beginnings for each prompt.

    Returns an empty dict if no reply has at least two tokens.
    """
    said = tokenizer(list(replies), add_special_tokens=False)["input_ids"] if replies else []
    answers = [ids for ids in said if len(ids) > 1]
    sides: dict[Kind, Sequence[Example]] = {"begun_safe": safe, "begun_benign": benign}
    found: dict[Kind, list[Pair]] = {}
    for kind, side in sides.items():
        if settings.by_kind()[kind][0] and answers:
            rng = random.Random(f"{kind} {seed}")
            prompts = [render_question(tokenizer, prompt_text(example)) for example in side] * BEGINNINGS
            found[kind] = [_pair(prompt, rng.choice(answers), rng, kind) for prompt in prompts]
    return found


def _pair(prompt: Sequence[int], answer: Sequence[int], rng: random.Random, kind: Kind) -> Pair:
    # At least one token of the answer is left out: a complete answer has nothing that could follow.
    asked = unlabeled_prompt([*prompt, *answer[: rng.randint(1, min(LONGEST, len(answer) - 1))]])
    return Pair(asked, asked if kind == "begun_benign" else unlabeled_prompt(prompt))
