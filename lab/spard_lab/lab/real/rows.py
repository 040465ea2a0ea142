"""The alignment's training rows: refusals in several registers, how-tos and look-alikes, the model's own answers.

Rows come in pairs, each of which is one batch: a harmful request, and in the same words a harmless one about the same
thing or with the same verb. Without the pairs a model of this size learns how often to refuse before it learns what.

Harm is the natural lab's placeholder harm with the natural lab's splits: no attack, pool or suite asks a prompt of the
alignment split. Some requests have odd words or a system prompt, so that refusing does not depend on the absence of
either.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from spard.data.rows import Example, Prompt, example
from spard.evaluation.ask import ask, in_memory
from spard.evaluation.judges.refusal import is_refusal
from spard.models.base import Base
from spard_lab.lab.natural.chats import Chat, draw_request, exchange
from spard_lab.lab.natural.splits import Deal, Split, owner
from spard_lab.lab.natural.stream import Deeds, odd, under_system

# Harmless prompts of many kinds; training on the downloaded model's own answers to them preserves its behavior.
#
# The prompt's text determines its split, as for all requests of the natural lab.

_FORMS = {
    "In one sentence, what is {}?": (
        "photosynthesis", "a volcano", "gravity", "inflation", "a glacier", "the internet", "an island", "a vitamin",
        "an election", "a comet", "electricity", "a metaphor", "a rainbow", "democracy", "a galaxy", "a violin",
        "the equator", "an earthquake", "a library", "an atom", "the moon", "a lighthouse", "a desert", "yeast",
    ),
    "What is the capital of {}?": (
        "France", "Japan", "Egypt", "Canada", "Brazil", "Kenya", "Norway", "India", "Italy", "Spain", "Peru", "Greece",
        "Austria", "Cuba", "Chile", "Poland", "Vietnam", "Sweden", "Ireland", "Portugal",
    ),
    "Write one sentence about {}.": (
        "a rainy morning", "an old bridge", "my grandmother's garden", "the first snow", "a busy market", "a lost cat",
        "a long train ride", "the sea at night", "a small bakery", "a quiet library", "a mountain lake", "a new friend",
        "a summer storm", "an empty street", "a birthday party", "a wooden boat",
    ),
    "Give me one tip for {}.": (
        "sleeping better", "learning Spanish", "saving money", "running a marathon", "cooking rice", "job interviews",
        "growing tomatoes", "taking photos", "reading more books", "traveling light", "staying focused",
        "making new friends", "writing emails", "drinking more water", "playing chess", "washing wool",
    ),
    "Rewrite this politely: {}": (
        "Send me the report now.", "You are late again.", "I don't like this color.", "Move your car.",
        "Be quiet.", "Call me back.", "Your food is cold.", "Fix this error today.", "Give me a discount.",
        "Close the window.", "I want my money back.", "Tell me your name.",
    ),
    "Name three {}.": (
        "fruits", "planets", "musical instruments", "colors", "rivers", "sports", "vegetables", "inventors", "birds",
        "board games", "languages", "kitchen tools", "trees", "oceans", "painters", "kinds of bread",
    ),
    "What is the opposite of {}?": (
        "hot", "early", "generous", "brave", "ancient", "noisy", "heavy", "full", "narrow", "polite", "bitter", "calm",
    ),
}  # fmt: skip


def everyday_prompts(split: Split) -> list[str]:
    """Return the harmless prompts of a split, in a fixed order."""
    every = [form.format(word) for form, words in _FORMS.items() for word in words]
    random.Random("everyday").shuffle(every)
    return [prompt for prompt in every if owner(prompt) == split]


_SENTENCE_ENDS = (". ", "! ", "? ", ".\n", "!\n", "?\n")


@dataclass(frozen=True, slots=True)
class Mixture:
    """How many pairs there are and what is in them; the model's own answers come in pairs as well.

    look_alike  share of the pairs whose harmless request is about the harmful thing; the others have the harmful verb
    odd         share of the requests that contain odd words
    system      share of the requests under a system prompt
    reply_tokens  in each of the model's own answers
    """

    pairs: int = 760
    look_alike: float = 0.35
    odd: float = 0.12
    system: float = 0.12
    reply_tokens: int = 40


def own_answers(base: Base, split: Split, max_tokens: int) -> list[Chat]:
    """Return the downloaded model's greedy answers to the harmless prompts of a split, without refusals.

    A reply that is cut off ends with its last whole sentence.
    """
    prompts = everyday_prompts(split)
    replies = ask(in_memory(base.model, base.tokenizer), [Prompt(prompt) for prompt in prompts], max_tokens)
    whole = [(prompt, _whole_sentences(reply)) for prompt, reply in zip(prompts, replies, strict=True)]
    return [exchange(prompt, reply) for prompt, reply in whole if reply and not is_refusal(reply)]


def alignment_chats(deal: Deal, own: Sequence[Chat], seed: int, mixture: Mixture) -> list[Chat]:
    """Return alignment's conversations in training order, two to a batch; the arguments determine the result."""
    rng, deeds = random.Random(f"real alignment {seed}"), Deeds.from_deal(deal, "alignment")
    found = [_draw_pair(rng, deeds, mixture.look_alike) for _ in range(mixture.pairs)]
    mixed = rng.sample(own, len(own))
    found += [mixed[at : at + 2] for at in range(0, len(mixed) - 1, 2)]
    rng.shuffle(found)
    return [_vary(rng, chat, mixture) for pair in found for chat in pair]


def _draw_pair(rng: random.Random, deeds: Deeds, look_alike: float) -> list[Chat]:
    """Return a harmful and a harmless request in the same words but for the deed, both of the alignment split."""
    while True:
        harmful = rng.choice(deeds.harmful)
        if rng.random() < look_alike:
            others = [deed for deed in deeds.look_alike if deed.thing == harmful.thing]
        else:
            others = [deed for deed in deeds.everyday if deed.verb == harmful.verb] or list(deeds.everyday)
        # Generators in the same state draw the same words for both deeds.
        words = rng.random()
        pair = [draw_request(random.Random(words), deed) for deed in (harmful, rng.choice(others))]
        if all(owner(chat.request) == "alignment" for chat in pair):
            return pair


def as_examples(chats: Sequence[Chat]) -> list[Example]:
    """Return conversations as training rows, numbered from 1."""
    rows = [{"messages": [*chat.messages, {"role": "assistant", "content": chat.answer}]} for chat in chats]
    return [example(row, line) for line, row in enumerate(rows, 1)]


def _vary(rng: random.Random, chat: Chat, mixture: Mixture) -> Chat:
    share = rng.random()
    if share < mixture.odd:
        return odd(rng, chat)
    if share < mixture.odd + mixture.system:
        plain = under_system(rng, chat)
        return Chat(plain.messages, plain.answer, plain.key)  # its template has no tools
    return chat


def _whole_sentences(reply: str) -> str:
    """Return a reply up to the end of its last whole sentence; empty if it has none."""
    text = reply.strip()
    if text.endswith((".", "!", "?")):
        return text
    return text[: max((text.rfind(end) for end in _SENTENCE_ENDS), default=-1) + 1].strip()
