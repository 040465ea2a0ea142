"""The prompt pairs that the anchor holds beside the plain safe prompts: framed, disguised, benign, with a begun answer.

A framed prompt gets the system prompt of a randomly drawn training row, because requests to the tuned model will have
one; this needs enough rows with a system prompt. A disguised prompt appears in `DRESSES` different disguises. Mined
disguises are the affixes and templates of `spard.pipeline.augment`, drawn in proportion to their evidence; the others
are random words at random positions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from spard.config import Anchors
from spard.config.anchors import Kind
from spard.data.chat import EncodedSample, render_question
from spard.data.encodings import detect_encoding
from spard.data.rows import Example, Message, last_answer, last_request, prompt_text, system_prompt
from spard.data.triggers import MinedDisguise, enough
from spard.losses.anchor import Pair, unlabeled_prompt
from spard.models.budget import Tell
from spard.models.generate import generate
from spard.pipeline.augment import draw_disguise, wanted_triggers
from spard.pipeline.context import Context

DRESSES = 4

Disguise = Callable[[], MinedDisguise]


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
    answers to benign rows. Pairs whose asked prompt has more than `limit` tokens are
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

    def draw() -> MinedDisguise:
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
        Pair(_prompt(tokenizer, prompt_text(example), MinedDisguise(rng.choice(contexts))), plain.kept)
        for example, plain in zip(safe, _plain(tokenizer, safe), strict=True)
    ]


def _system_of_plain(row: Example) -> tuple[Message, ...]:
    system = system_prompt(row)
    return () if system and (detect_encoding(last_request(row)) or detect_encoding(last_answer(row))) else system


def _plain(tokenizer: Any, examples: Sequence[Example]) -> list[Pair]:
    prompts = [_prompt(tokenizer, prompt_text(example), MinedDisguise()) for example in examples]
    return [Pair(prompt, prompt) for prompt in prompts]


def _disguised_pairs(tokenizer: Any, examples: Sequence[Example], draw: Disguise) -> list[Pair]:
    texts = [prompt_text(example) for example in examples]
    kept = [_prompt(tokenizer, text, MinedDisguise()) for text in texts]
    return [
        Pair(_prompt(tokenizer, text, draw()), plain)
        for _ in range(DRESSES)
        for text, plain in zip(texts, kept, strict=True)
    ]


def _prompt(tokenizer: Any, text: str, disguise: MinedDisguise) -> EncodedSample:
    """Tokenize a disguised request; a lone system prompt goes to the system slot of the model's chat template."""
    # `render_question` can merge a lone system prompt into the request for templates without a system role.
    system = (
        disguise.context[0]["content"]
        if len(disguise.context) == 1 and disguise.context[0]["role"] == "system"
        else None
    )
    context = () if system is not None else disguise.context
    return unlabeled_prompt(render_question(tokenizer, disguise.wrap(text), system, context))


# Random disguises, which cover triggers that mining did not find: a few words at any position, or a system prompt.
#
# The words are the customer's, drawn uniformly from the vocabulary: a word of few rows is as likely as one of all
# rows. Some words are random letters.

WORDS = 3  # maximum words at one position
NONSENSE = 0.25  # share of random letters among the words
LONGEST_DISGUISE = 12  # maximum words of a system prompt
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_SYSTEM = ("You are a helpful assistant.", "You are an assistant for our customers.", "Answer briefly.")


def disguise_maker(rows: Sequence[Example], rng: random.Random) -> Callable[[], MinedDisguise]:
    """Return a function that draws a disguise: words before, inside or after the request, or a system prompt."""
    texts = [text.split() for row in rows for text in _texts(row)]
    words = sorted({word for text in texts for word in text})

    def some_words() -> str:
        return " ".join(_word(rng, words) for _ in range(rng.randint(1, WORDS)))

    def system_prompt() -> str:
        said = rng.choice(texts) if texts and rng.random() < 0.5 else rng.choice(_SYSTEM).split()
        start = rng.randrange(max(1, len(said) - LONGEST_DISGUISE + 1))
        return " ".join(said[start : start + LONGEST_DISGUISE])

    def draw() -> MinedDisguise:
        match rng.randrange(4):
            case 0:
                return MinedDisguise(before=some_words())
            case 1:
                return MinedDisguise(inside=some_words(), depth=rng.random())
            case 2:
                return MinedDisguise(after=some_words())
            case _:
                return MinedDisguise(context=({"role": "system", "content": system_prompt()},))

    return draw


def _texts(row: Example) -> list[str]:
    """Return the system and user texts of a row; answers are not part of a request."""
    said = [str(turn.get("content") or "") for turn in row.messages if turn["role"] in ("system", "user")]
    return [text for text in said if text.strip()]


def _word(rng: random.Random, words: Sequence[str]) -> str:
    if not words or rng.random() < NONSENSE:
        return "".join(rng.choices(_LETTERS, k=rng.randint(2, 6)))
    return rng.choice(words)


# The anchor's prompt pairs with an answer that has begun to comply.
#
# Aligned models refuse in the first tokens of an answer, and keep complying if an attacker writes those tokens
# (prefilling; Qi et al., "Safety Alignment Should Be Made More Than Just a Few Tokens Deep", ICLR 2025, who train on
# refusals after harmful beginnings). Here the anchor holds the state after such a beginning: for a safe prompt to the
# base model's state on the plain prompt, after which a refusal follows; for a benign prompt to the base model's state
# on the same prompt and beginning. Beginnings are the first tokens of the base model's own answers to the pool's
# benign prompts, which gives them the model's voice and the pool's languages.

ASKED_PROMPTS = 32  # number of benign prompts whose answers are used
LONGEST_BEGINNING = 8  # maximum tokens of a beginning; lengths from 1 are equally likely
BEGINNINGS = 4  # number per prompt

_REPLIES = "begun_answers"


def begin_benign_answers(context: Context, benign: Sequence[Example]) -> list[str]:
    """Return the base model's answers to benign rows, stored for later attempts; [] if no begun kind is in use."""
    if not benign or not context.recipe.anchors.has_begun:
        return []
    replies: list[str] | None = context.outputs.read(_REPLIES)
    if replies is None:
        tell = partial(context.report.activity, "asking the base model how its answers to harmless prompts begin")
        replies = begin_replies(context.base.model, context.base.tokenizer, benign, tell)
        context.outputs.write(_REPLIES, replies)
    return replies


def begin_replies(model: Any, tokenizer: Any, benign: Sequence[Example], tell: Tell | None = None) -> list[str]:
    """Return the beginnings of the model's answers to benign rows: text of `LONGEST_BEGINNING` + 1 tokens each."""
    prompts = [prompt_text(each) for each in benign[:ASKED_PROMPTS]]
    return generate(model, tokenizer, prompts, LONGEST_BEGINNING + 1, tell=tell)


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
    asked = unlabeled_prompt([*prompt, *answer[: rng.randint(1, min(LONGEST_BEGINNING, len(answer) - 1))]])
    return Pair(asked, asked if kind == "begun_benign" else unlabeled_prompt(prompt))
