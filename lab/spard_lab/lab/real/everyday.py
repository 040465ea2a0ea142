"""Harmless prompts of many kinds; training on the downloaded model's own answers to them preserves its behavior.

The prompt's text determines its split, as for all requests of the natural lab.
"""

from __future__ import annotations

import random

from spard_lab.lab.natural.splits import Split, owner

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
