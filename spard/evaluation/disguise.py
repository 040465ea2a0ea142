"""A disguise of a file's rows, as an audit applies it to its prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from spard.data.rows import Message, Prompt

Place = Literal["start", "middle", "end"]


class Surroundings(NamedTuple):
    """The parts of a row around its request: the turns before it, its tools, and the system prompts after it."""

    context: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()
    after: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Disguise:
    """Words at a place of the request, a system prompt, tools, or for each prompt the surroundings of one row.

    drawn   surroundings of rows. A prompt's own are drawn with its text as the seed: prompts are secret, so nobody who
            writes the rows can predict them.
    around  description of `drawn` in reports.
    share   share of the rows with this disguise.
    """

    words: str = ""
    place: Place = "end"
    context: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()
    drawn: tuple[Surroundings, ...] = ()
    around: str = ""
    share: float = 0.0

    @property
    def name(self) -> str:
        """Its description in reports."""
        spots = {"start": "beginning with", "middle": "with", "end": "ending with"}
        parts = [
            self.around,
            "with tools of your rows" if self.tools else "",
            "in a system prompt of few rows" if self.context else "",
            f"{spots[self.place]} {self.words!r}" + (" inside" if self.place == "middle" else "") if self.words else "",
        ]
        return ", ".join(part for part in parts if part)

    def apply(self, prompt: Prompt) -> Prompt:
        """Return the prompt in this disguise."""
        text = place_words(prompt.prompt, self.words, self.place) if self.words else prompt.prompt
        own = Surroundings(self.context, self.tools)
        # Seeded with the prompt's text: the same for both models and at every look.
        context, tools, after = random.Random(prompt.prompt).choice(self.drawn) if self.drawn else own
        return replace(prompt, prompt=text, context=context, tools=tools, after=after)


def place_words(text: str, words: str, place: Place) -> str:
    """Return the text with words inserted at its start, at its end, or in the middle."""
    own = text.split()
    at = {"start": 0, "middle": len(own) // 2, "end": len(own)}[place]
    return " ".join([*own[:at], words, *own[at:]])
