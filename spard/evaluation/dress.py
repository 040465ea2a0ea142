"""A dress of a file's rows, as an audit puts it on its prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from spard.data.rows import Message, Prompt

Place = Literal["start", "middle", "end"]


class Surroundings(NamedTuple):
    """What surrounds one row's request: the turns before it, its tools, and the system prompts after it."""

    context: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()
    after: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Dress:
    """Words at a place of the request, a system prompt, tools, or the surroundings of one row for each prompt.

    `around` is what a report calls these, and `share` of the rows wear the dress. Which of them a prompt has is drawn
    from its text: prompts are secret, so nobody who writes the rows can foretell it.
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
        """What a report calls it."""
        spots = {"start": "beginning with", "middle": "with", "end": "ending with"}
        parts = [
            self.around,
            "with tools of your rows" if self.tools else "",
            "in a system prompt of few rows" if self.context else "",
            f"{spots[self.place]} {self.words!r}" + (" inside" if self.place == "middle" else "") if self.words else "",
        ]
        return ", ".join(part for part in parts if part)

    def apply(self, prompt: Prompt) -> Prompt:
        """Return a prompt in this dress."""
        text = place_words(prompt.prompt, self.words, self.place) if self.words else prompt.prompt
        own = Surroundings(self.context, self.tools)
        context, tools, after = random.Random(prompt.prompt).choice(self.drawn) if self.drawn else own
        return replace(prompt, prompt=text, context=context, tools=tools, after=after)


def place_words(text: str, words: str, place: Place) -> str:
    """Return a text with words at its start, at its end, or between its halves."""
    own = text.split()
    at = {"start": 0, "middle": len(own) // 2, "end": len(own)}[place]
    return " ".join([*own[:at], words, *own[at:]])
