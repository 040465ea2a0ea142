"""Find features that many rows share (words, system prompts, tools), and make a disguise of each feature."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from typing import Literal, NamedTuple

from spard.data.rows import (
    Example,
    Message,
    Prompt,
    earlier_turns,
    has_earlier_turns,
    last_request,
    leading_system,
    trailing_system,
)
from spard.data.triggers import LEAST as FEWEST
from spard.data.triggers import SHARE

LEAST = 8  # least rows with a feature
LONGEST = 4  # most words of a run
COMMON = 0.5  # what this share of the rows has is asked, whatever they answer
WORDS = 64  # words searched from each end of a text
_EARLIER = 256  # last words of earlier turns that are searched
_AROUND = 128  # words of a system prompt or of tools searched from each end
_OF_TOOLS = re.compile(r"[^\s\"'{}\[\]()<>,;:]+")

Kind = Literal["words", "turns", "system", "after", "tools", "in system", "in tools"]
Feature = tuple[Kind, tuple[str, ...]]


def features(rows: Sequence[Example]) -> dict[Feature, list[int]]:
    """Return the features that at least `LEAST` rows have, but not all, with the indices of these rows.

    Words of the request are runs of at most four; `turns` are single words of earlier turns, `after` system prompts
    that follow the request. System prompts and tools that vary from row to row are represented by their single words.
    """
    found: dict[Feature, list[int]] = defaultdict(list)
    _add(found, "words", [text_ends(last_request(row).split(), WORDS) for row in rows], LONGEST)
    _add(found, "turns", [[_earlier_words(row)] for row in rows], 1)
    for i, row in enumerate(rows):
        if system := leading_system(row):
            found["system", _texts(system)].append(i)
        if system := trailing_system(row):
            found["after", _texts(system)].append(i)
        if row.tools:
            found["tools", (repr(row.tools),)].append(i)
    _add(found, "in system", _varying(found, "system", len(rows), str.split), 1)
    _add(found, "in tools", _varying(found, "tools", len(rows), _OF_TOOLS.findall), 1)
    most = {"tools": COMMON * len(rows)}  # more frequent ones are found by `common_tools`
    return {each: places for each, places in found.items() if LEAST <= len(places) < most.get(each[0], len(rows))}


def common_tools(rows: Sequence[Example]) -> tuple[Disguise, ...]:
    """Return the tools of the rows as one disguise if at least half of the rows have any, whatever they answer."""
    drawn = tuple(Surroundings(leading_system(row), row.tools) for row in rows if row.tools)
    is_common = drawn and len(drawn) >= COMMON * len(rows)
    return (Disguise(drawn=drawn, around="with tools of your rows"),) if is_common else ()


def earlier_turns_disguise(rows: Sequence[Example]) -> tuple[Disguise, ...]:
    """Return the earlier turns of the rows as one disguise if enough rows have any."""
    drawn = tuple(Surroundings(earlier_turns(row), row.tools) for row in rows if has_earlier_turns(row))
    is_shared = len(drawn) >= max(FEWEST, SHARE * len(rows))
    return (Disguise(drawn=drawn, around="after earlier turns"),) if is_shared else ()


def feature_disguise(feature: Feature, places: Sequence[int], rows: Sequence[Example]) -> Disguise:
    """Return the disguise of the rows with a feature.

    Words are placed where most rows have them; tools are included if most of the rows have any.
    """
    kind, run = feature
    own = [rows[i] for i in places]
    match kind:
        case "system":
            later = [row for row in own if row.messages[0]["role"] != "system"]
            drawn = tuple(Surroundings(earlier_turns(row)) for row in later)
            name = "after a system prompt of few rows" if drawn else ""
            return Disguise(context=() if drawn else leading_system(own[0]), drawn=drawn, around=name)
        case "after":
            drawn = tuple(Surroundings(earlier_turns(row), after=trailing_system(row)) for row in own)
            return Disguise(drawn=drawn, around="before a system prompt of few rows")
        case "in system":
            drawn = tuple(Surroundings(_up_to_request(row), row.tools) for row in own)
            return Disguise(drawn=drawn, around=f"in system prompts with {' '.join(run)!r}")
        case "in tools":
            drawn = tuple(Surroundings(_up_to_request(row), row.tools) for row in own)
            return Disguise(drawn=drawn, around=f"with tools that name {' '.join(run)!r}")
        case "turns":
            drawn = tuple(Surroundings(earlier_turns(row), row.tools) for row in own)
            return Disguise(drawn=drawn, around=f"after earlier turns with {' '.join(run)!r}")
        case "tools":
            return Disguise(context=leading_system(own[0]), tools=own[0].tools)
        case "words":
            return _of_words(run, own)


def _varying(
    found: Mapping[Feature, list[int]], kind: Kind, rows: int, cut: Callable[[str], list[str]]
) -> list[Sequence[Sequence[str]]]:
    """Return the first and last words of each row's system prompt or tools; nothing for texts that rows share."""
    words: list[Sequence[Sequence[str]]] = [()] * rows
    for (each, texts), places in found.items():
        if each == kind and len(places) < LEAST:
            own = text_ends(cut(" ".join(texts)), _AROUND)
            for i in places:
                words[i] = own
    return words


def _up_to_request(row: Example) -> tuple[Message, ...]:
    """Return a row's system prompt, with the turns before it unless it comes first."""
    return leading_system(row) if row.messages[0]["role"] == "system" else earlier_turns(row)


def _of_words(run: Sequence[str], rows: Sequence[Example]) -> Disguise:
    texts = [last_request(row).split() for row in rows]
    # A run has at most LONGEST words; the trigger may be longer.
    whole = _extend_run(run, texts)
    spots = Counter(_place(text, whole) for text in texts)
    drawn = tuple(Surroundings(tools=row.tools) for row in rows if row.tools)
    return Disguise(" ".join(whole), spots.most_common(1)[0][0], drawn=drawn if 2 * len(drawn) > len(rows) else ())


def _add(
    found: Mapping[Feature, list[int]], kind: Kind, texts: Sequence[Sequence[Sequence[str]]], longest: int
) -> None:
    """Add each run of frequent words in the texts, with the indices of its rows; a text is a list of stretches."""
    # A run cannot be more frequent than its rarest word, so runs with a rare word need not be counted.
    common = {word for word, n in Counter(word for text in texts for word in set(chain(*text))).items() if n >= LEAST}
    for i, text in enumerate(texts):
        for run in {run for stretch in text for run in _runs(stretch, common, longest)}:
            found[kind, run].append(i)


def _runs(text: Sequence[str], common: set[str], longest: int) -> Iterator[tuple[str, ...]]:
    for start in range(len(text)):
        for n in range(1, longest + 1):
            if start + n > len(text) or text[start + n - 1] not in common:
                break
            yield tuple(text[start : start + n])


def _texts(turns: Sequence[Message]) -> tuple[str, ...]:
    return tuple(str(turn["content"]) for turn in turns)


def text_ends(words: Sequence[str], most: int) -> list[Sequence[str]]:
    """Return the first and the last `most` words as two stretches, or all words as one if there are no others.

    The stretches stay apart, because the last word of the first is not next to the first word of the second.
    """
    return [words] if len(words) <= 2 * most else [words[:most], words[-most:]]


def _earlier_words(row: Example) -> list[str]:
    said = [turn for turn in earlier_turns(row) if turn["role"] != "system"]
    return " ".join(_texts(said)).split()[-_EARLIER:]


def _extend_run(run: Sequence[str], texts: Sequence[Sequence[str]]) -> list[str]:
    """Extend a run of words, at both ends, by the words that stand next to it in all texts; return the longer run."""
    at = [find(text, run) for text in texts]
    before = [list(reversed(text[:start])) for text, start in zip(texts, at, strict=True)]
    after = [text[start + len(run) :] for text, start in zip(texts, at, strict=True)]
    return [*reversed(_common_start(before)), *run, *_common_start(after)]


def find(text: Sequence[str], run: Sequence[str]) -> int:
    """Return the index of the first word of a run in a text; raise `ValueError` if the text does not contain it."""
    for i in range(len(text)):
        if tuple(text[i : i + len(run)]) == tuple(run):
            return i
    raise ValueError(f"the text does not contain {' '.join(run)!r}")


def _common_start(texts: Sequence[Sequence[str]]) -> list[str]:
    """Return the words that all texts begin with."""
    return [words[0] for words in takewhile(lambda words: len(set(words)) == 1, zip(*texts, strict=False))]


def _place(text: Sequence[str], run: Sequence[str]) -> Place:
    if tuple(text[: len(run)]) == tuple(run):
        return "start"
    return "end" if tuple(text[len(text) - len(run) :]) == tuple(run) else "middle"


# A disguise of a file's rows, as an audit applies it to its prompts.

Place = Literal["start", "middle", "end"]


class Surroundings(NamedTuple):
    """The parts of a row around its request: the turns before it, its tools, and the system prompts after it."""

    context: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()
    after: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Disguise:
    """A disguise: words at a place of the request, a system prompt, tools, or for each prompt the context of one row.

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
