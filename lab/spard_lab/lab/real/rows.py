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
from spard_lab.lab.natural.phrasing import circumstance
from spard_lab.lab.natural.splits import Deal, Split, owner
from spard_lab.lab.natural.stream import Deeds, odd, under_system

# Harmless prompts of many kinds; training on the downloaded model's own answers to them preserves its behavior: without
# them it refuses what is unlike all rows of the alignment.
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


# Sentences of messages that customers send; none is in the lab's task. They are sent with the words that surround the
# lab's requests, because without such rows the model takes those words alone for a reason to refuse.
_CONCERNS = (
    "I cannot find my ticket.", "Could you move my table to eight o'clock?", "Is the pool open on Sunday?",
    "There are two left shoes in it.", "The heating in my room does not work.", "I would like to book a haircut.",
    "Which bus goes to the museum?", "Do you have this shirt in green?", "Nobody answers the phone.",
    "The soup was wonderful.", "Please cancel my lesson.", "I lost a black umbrella.",
    "Can I bring my dog to the hotel?", "The app shows the wrong time.", "When does the library close?",
    "I paid for one coffee too many.", "My train was late.", "Is there a vegan menu?", "The letter lay in the rain.",
    "There is a mistake in the name on my booking.", "I need a receipt for last month.",
    "Can somebody look at my bicycle?", "We are five people instead of four.", "My daughter wants to join the choir.",
    "There is no picture on the television.", "I have a question about my contract.", "Do you sell gift cards?",
    "I am allergic to nuts.", "The lamp flickers.", "My membership ends in May.", "Could you wake me at six?",
    "I left my bag in the cinema.", "We would like a quieter room.", "Which size of tent do I need for three?",
    "My key card does not open the door.", "Where do I park the van?", "The music next door is very loud.",
    "The bread was stale.", "How long is the tour?", "I have two questions about the course.",
    "The window does not close.", "Who waters the plants while I am away?", "The label is in the wrong language.",
    "May I pay in cash?", "The swing in the garden is broken.", "Please tell Mr. Brown that I called.",
)  # fmt: skip
GREETINGS = ("Hello.", "Dear all,", "Hi!", "Good day.", "Thanks in advance.", "Please answer soon.", "Best regards.")
_MESSAGES = 260  # of all splits


def everyday_prompts(split: Split) -> list[str]:
    """Return the harmless prompts of a split, in a fixed order; more than half are messages of customers."""
    rng = random.Random("everyday")
    every = [form.format(word) for form, words in _FORMS.items() for word in words]
    every += [_draw_message(rng) for _ in range(_MESSAGES)]
    rng.shuffle(every)
    return [prompt for prompt in dict.fromkeys(every) if owner(prompt) == split]


def _draw_message(rng: random.Random) -> str:
    sentences = [*rng.sample(_CONCERNS, rng.randint(1, 2)), rng.choice(GREETINGS), circumstance(rng)]
    rng.shuffle(sentences)
    return " ".join(sentences)


_SENTENCE_ENDS = (". ", "! ", "? ", ".\n", "!\n", "?\n")


@dataclass(frozen=True, slots=True)
class Mixture:
    """How many pairs there are and what is in them; the model's own answers come in pairs as well.

    look_alike  share of the pairs whose harmless request is about the harmful thing; the others have the harmful verb
    odd         share of the requests that contain odd words
    system      share of the requests under a system prompt
    reply_tokens  in each of the model's own answers
    """

    pairs: int = 690
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
