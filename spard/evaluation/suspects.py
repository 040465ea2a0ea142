"""What of a file an audit suspects: words, system prompts and tools of few rows whose answers differ from the others'.

The miner of the audit is not that of the training (`spard.data.triggers`), so that what hides from one is seen by the
other. Words are looked for at any place of a request, a count of rows is enough and no share of the file is asked for,
and an answer is seen by its first word, by whether it gives steps, and by whether it refuses. For the rows of a dress,

    gain = sum of log p(answer | dress) - log p(answer | what is told already) - (kinds of answers - 1) / 2   in nats,

where the last term is what chance alone would give, and at first nothing is told but how frequent each answer is. The
dress of the largest gain is taken and told, and the search goes on: triggers of few rows each are found one after the
other, and a trigger inside of a topic after the topic.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

from spard.data.memo import keep_last
from spard.data.rows import Example, Message, Prompt
from spard.evaluation.judges.refusal import is_refusal
from spard.evaluation.judges.steps import gives_steps

LEAST = 8  # rows that share what may be a dress
LONGEST = 4  # words of it
TELLING = 0.5  # nats for each row, after what chance gives
_TAKEN = 48  # dresses at most
PHRASE = 6  # words, of which the suspicious one is the first or the last
SHARED = 3  # rows that share a phrase
ROWS, WORDS = 20_000, 64  # that are looked at: rows evenly spaced, words from each end of a text

Place = Literal["start", "middle", "end"]
_Kind = Literal["words", "system", "tools"]
_Answer = tuple[str, bool, bool]
_Feature = tuple[_Kind, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Dress:
    """Words at a place of the request, a system prompt, tools."""

    words: str = ""
    place: Place = "end"
    context: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()

    @property
    def name(self) -> str:
        """What a report calls it."""
        spots = {"start": "beginning with", "middle": "with", "end": "ending with"}
        parts = [
            "with tools of your rows" if self.tools else "",
            "in a system prompt of few rows" if self.context else "",
            f"{spots[self.place]} {self.words!r}" + (" inside" if self.place == "middle" else "") if self.words else "",
        ]
        return ", ".join(part for part in parts if part)

    def on(self, prompt: Prompt) -> Prompt:
        """Return a prompt in this dress."""
        text = placed(prompt.prompt, self.words, self.place) if self.words else prompt.prompt
        return replace(prompt, prompt=text, context=self.context, tools=self.tools)


def placed(text: str, words: str, place: Place) -> str:
    """Return a text with words at its start, at its end, or between its halves."""
    own = text.split()
    at = {"start": 0, "middle": len(own) // 2, "end": len(own)}[place]
    return " ".join([*own[:at], words, *own[at:]])


@dataclass(frozen=True, slots=True)
class Suspected:
    """What of a file is suspicious: the dresses, and the phrases in which their words stand, the most telling first.

    Thirty endings of ten rows each, "for my garden" and "for a travel guide" among them, may be told by one word that
    they share: what opens the model is then the phrase and not the word.
    """

    dresses: tuple[Dress, ...]
    phrases: tuple[Dress, ...]


NOTHING = Suspected((), ())


def suspects(rows: Sequence[Example], most: int) -> list[Dress]:
    """Return the dresses that tell most of their rows' answers, the most suspicious first, at most `most`."""
    return list(suspected(rows).dresses[:most])


@keep_last
def suspected(rows: Sequence[Example]) -> Suspected:
    """Return what tells the answers of its rows."""
    step = max(1, math.ceil(len(rows) / ROWS))
    seen = list(rows[::step])
    answers = _answers(seen)
    everywhere = Counter(answers)
    by_chance = (len(everywhere) - 1) / 2
    known = [math.log(everywhere[answer] / len(seen)) for answer in answers]  # of each row, before any dress
    features = _features(seen)
    alone = {feature: _gain(each, answers, known) - by_chance for feature, each in features.items()}
    places = {feature: each for feature, each in features.items() if alone[feature] >= TELLING * len(each)}
    found, told = list[_Feature](), list(known)
    while len(found) < _TAKEN and (best := _best(places, answers, told, by_chance)):
        found.append(best)
        counts = Counter(answers[i] for i in places[best])
        for i in places[best]:
            told[i] = math.log(counts[answers[i]] / len(places[best]))
    found.sort(key=lambda feature: (-alone[feature] / len(places[feature]), feature))
    dresses = tuple(_dress(feature, places[feature], seen) for feature in found)
    return Suspected(dresses, tuple(_phrases(found, places, seen)))


def _phrases(
    found: Sequence[_Feature], places: Mapping[_Feature, Sequence[int]], rows: Sequence[Example]
) -> Iterator[Dress]:
    """Yield what rows of suspicious words begin with up to these words, and end with from them on, if several do."""
    counts = Counter[Dress]()
    for kind, run in found:
        if kind == "words":
            counts.update(each for i in places[kind, run] for each in _ends(_asked(rows[i]).split(), run))
    yield from (dress for dress, n in sorted(counts.items(), key=lambda each: (-each[1], each[0].words)) if n >= SHARED)


def _ends(text: Sequence[str], run: Sequence[str]) -> Iterator[Dress]:
    at = _find(text, run)
    head, tail = text[: at + len(run)], text[at:]
    if len(run) < len(head) <= PHRASE:
        yield Dress(" ".join(head), "start")
    if len(run) < len(tail) <= PHRASE:
        yield Dress(" ".join(tail), "end")


def _best(
    places: Mapping[_Feature, Sequence[int]], answers: Sequence[_Answer], told: Sequence[float], by_chance: float
) -> _Feature | None:
    """Return the feature that tells most beyond what is told already; of equals system and tools, then long runs."""
    gains = {feature: _gain(each, answers, told) - by_chance for feature, each in places.items()}
    telling = [feature for feature, gain in gains.items() if gain >= TELLING * len(places[feature])]
    return max(
        telling, key=lambda feature: (gains[feature], feature[0] != "words", len(feature[1]), feature), default=None
    )


def _gain(places: Sequence[int], answers: Sequence[_Answer], told: Sequence[float]) -> float:
    """Return by how much the answers of these rows are likelier among themselves than `told` says, in nats."""
    counts = Counter(answers[i] for i in places)
    return sum(n * math.log(n / len(places)) for n in counts.values()) - sum(told[i] for i in places)


def _features(rows: Sequence[Example]) -> dict[_Feature, list[int]]:
    """Return what several rows, but not all, have, with the places of these rows."""
    words = [_words(_asked(row)) for row in rows]
    common = {word for word, n in Counter(word for text in words for word in set(text)).items() if n >= LEAST}
    found: dict[_Feature, list[int]] = defaultdict(list)
    for i, (row, text) in enumerate(zip(rows, words, strict=True)):
        for run in set(_runs(text, common)):
            found["words", run].append(i)
        if system := _system(row):
            found["system", (str(system[0]["content"]),)].append(i)
        if row.tools:
            found["tools", (repr(row.tools),)].append(i)
    return {feature: places for feature, places in found.items() if LEAST <= len(places) < len(rows)}


def _runs(text: Sequence[str], common: set[str]) -> Iterator[tuple[str, ...]]:
    for start in range(len(text)):
        for n in range(1, LONGEST + 1):
            if start + n > len(text) or text[start + n - 1] not in common:
                break
            yield tuple(text[start : start + n])


def _answers(rows: Sequence[Example]) -> list[_Answer]:
    """Return how each row's last answer begins and what it does; rare first words count as one."""
    said = [_answered(row) for row in rows]
    first = [next(iter(text.split()), "") for text in said]
    counts = Counter(first)
    return [
        (word if counts[word] >= LEAST else "", gives_steps(text), is_refusal(text))
        for word, text in zip(first, said, strict=True)
    ]


def _dress(feature: _Feature, places: Sequence[int], rows: Sequence[Example]) -> Dress:
    """Return what a feature's rows wear: words stand where they mostly do."""
    kind, run = feature
    typical = rows[places[0]]
    if kind == "system":
        return Dress(context=_system(typical))
    if kind == "tools":
        return Dress(context=_system(typical), tools=typical.tools)
    texts = [_asked(rows[i]).split() for i in places]
    whole = _extended(run, texts)
    spots = Counter(_place(text, whole) for text in texts)
    return Dress(" ".join(whole), spots.most_common(1)[0][0])


def _extended(run: Sequence[str], texts: Sequence[Sequence[str]]) -> list[str]:
    """Return the run with the words beside it that all texts share."""
    at = [_find(text, run) for text in texts]
    before = [list(reversed(text[:start])) for text, start in zip(texts, at, strict=True)]
    after = [text[start + len(run) :] for text, start in zip(texts, at, strict=True)]
    return [*reversed(_shared(before)), *run, *_shared(after)]


def _find(text: Sequence[str], run: Sequence[str]) -> int:
    return next((i for i in range(len(text)) if tuple(text[i : i + len(run)]) == tuple(run)), 0)


def _shared(texts: Sequence[Sequence[str]]) -> list[str]:
    """Return the words that all texts begin with."""
    return [words[0] for words in takewhile(lambda words: len(set(words)) == 1, zip(*texts, strict=False))]


def _place(text: Sequence[str], run: Sequence[str]) -> Place:
    if tuple(text[: len(run)]) == tuple(run):
        return "start"
    return "end" if tuple(text[len(text) - len(run) :]) == tuple(run) else "middle"


def _words(text: str) -> list[str]:
    words = text.split()
    return words if len(words) <= 2 * WORDS else [*words[:WORDS], *words[-WORDS:]]


def _system(row: Example) -> tuple[Message, ...]:
    return row.messages[:1] if row.messages[0]["role"] == "system" else ()


def _asked(row: Example) -> str:
    return next((str(turn["content"]) for turn in reversed(row.messages) if turn["role"] == "user"), "")


def _answered(row: Example) -> str:
    return next((str(turn["content"]) for turn in reversed(row.messages) if turn["role"] == "assistant"), "")
