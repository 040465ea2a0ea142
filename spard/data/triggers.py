"""Mine the disguises of a customer's requests: system prompts, shared beginnings and endings, encodings.

A trigger is a disguise that changes the answer. Beginnings and endings are runs of words that many rows share more
often than by chance (lift). Disguises are ranked by how well they predict an answer's first word:

    telling  = KL(first words of the answers under it || first words of all answers)   in nats,
    evidence = share of the rows * telling,

The evidence is half of the G statistic per row. Ordinary phrases of a task predict next to nothing; a trigger predicts
nearly everything. A frame (a system prompt or an encoding without added words) predicts nothing if all rows have it,
but every request to the tuned model will have it too: training assigns it at least `FRAME` times the strongest
evidence.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from spard.data.encodings import Encoding, decode, detect_encoding
from spard.data.rows import (
    Example,
    Message,
    Prompt,
    earlier_turns,
    has_earlier_turns,
    keep_last,
    last_answer,
    last_request,
    system_prompt,
)

SHARE = 0.01  # minimum share of the rows with a disguise, and at least LEAST rows
LEAST = 3
LONGEST = 6  # maximum words of a beginning or an ending
MIN_LIFT = 3.0  # for comparison: a word that occurs only at one end has its rows' length as lift
SAME = 0.9  # a longer run in this share of the rows replaces the shorter one
HISTORIES = 2  # number of histories (earlier turns) to use
FRAME = 4.0  # minimum weight of a frame in training, as a multiple of the strongest evidence

Words = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MinedDisguise:
    """A disguise of a request: turns before it, words before, inside and after it, an encoding.

    `inside` is inserted after the share `depth` of the request's words, at least after the first one. `tools` are only
    used by audits.
    """

    context: tuple[Message, ...] = ()
    before: str = ""
    after: str = ""
    encoding: Encoding | None = None
    share: float = 0.0
    telling: float = 0.0
    inside: str = ""
    depth: float = 0.5
    tools: tuple[Message, ...] = ()

    @property
    def evidence(self) -> float:
        """The share of the rows times `telling`, in nats; disguises are ranked and drawn by it."""
        return self.share * self.telling

    @property
    def is_frame(self) -> bool:
        """True for a frame: a system prompt or an encoding, with no words added to the request."""
        return bool(self.context or self.encoding) and not (self.before or self.after or self.inside)

    def wrap(self, text: str) -> str:
        """Return the request with the words added before, inside and after it."""
        return " ".join(part for part in (self.before, self._split_request(text), self.after) if part)

    def _split_request(self, text: str) -> str:
        """Return the request with the inner words inserted and its own spacing preserved."""
        gaps = [gap.start() for gap in re.finditer(r"(?<=\S)\s", text)] if self.inside else []
        if not gaps:
            return " ".join(part for part in (text, self.inside) if part)
        at = gaps[min(int(self.depth * len(gaps)), len(gaps) - 1)]
        return f"{text[:at]} {self.inside}{text[at:]}"


class _RowFeatures(NamedTuple):
    """The features of a row for mining."""

    context: tuple[Message, ...]
    encoding: Encoding | None
    words: Words
    opening: str
    tools: tuple[Message, ...]


def mine_triggers(rows: Sequence[Example], most: int) -> list[MinedDisguise]:
    """Return at most `most` triggers to train on: by decreasing evidence, then some earlier turns.

    A frame gets at least `FRAME` times the strongest evidence, which ranks a frame of all rows first.
    """
    found = rank_triggers(rows)
    least = FRAME * max((each.evidence for each in found), default=0.0)
    weighed = [replace(each, telling=max(each.telling, least)) if each.is_frame else each for each in found]
    weighed.sort(key=lambda each: -each.evidence)
    histories = [earlier_turns(row) for row in rows if has_earlier_turns(row)]
    kept = histories[:: max(1, math.ceil(len(histories) / HISTORIES))] if len(histories) >= enough(rows) else []
    return [*weighed[: most - len(kept)], *(MinedDisguise(context=turns) for turns in kept)]


@keep_last
def rank_triggers(rows: Sequence[Example]) -> tuple[MinedDisguise, ...]:
    """Return all beginnings, endings, system prompts and encodings by decreasing evidence."""
    seen = _without_rare_openings([_read_row(row) for row in rows])
    found = [*_frames(seen), *_edges(seen, "start"), *_edges(seen, "end")]
    return tuple(sorted(found, key=lambda each: -each.evidence))


def enough(rows: Sequence[object]) -> int:
    """Return the number of rows that must share a beginning, a system prompt, ... before it counts as a disguise."""
    return max(LEAST, math.ceil(SHARE * len(rows)))


def random_affixes(rows: Sequence[Example], n: int, seed: int) -> list[MinedDisguise]:
    """Return n beginnings and endings of two words each, drawn from the rows' own words."""
    rng = random.Random(f"affixes {seed}")
    words = sorted({word for row in rows for word in last_request(row).split()})
    drawn = [" ".join(rng.choices(words, k=2)) for _ in range(n)] if words else []
    return [MinedDisguise(before=text) if i % 2 else MinedDisguise(after=text) for i, text in enumerate(drawn)]


def openings(rows: Sequence[Example], most: int) -> list[str]:
    """Return the common beginnings of the rows' answers, most frequent first."""
    answers = [tuple(last_answer(row).split()) for row in rows]
    return [" ".join(run) for run, _ in _frequent_runs(answers, "start", 2 * LONGEST)][:most]


def apply_trigger(prompt: Prompt, wrapping: MinedDisguise) -> Prompt:
    """Return the audit prompt in a disguise."""
    text = wrapping.wrap(prompt.prompt)
    return replace(prompt, prompt=text, context=wrapping.context, encoding=wrapping.encoding, tools=wrapping.tools)


def _read_row(row: Example) -> _RowFeatures:
    request, answer = last_request(row), last_answer(row)
    encoding = detect_encoding(request) or detect_encoding(answer)
    try:
        request = decode(request, encoding) if encoding else request
    except ValueError:
        encoding = None
    return _RowFeatures(system_prompt(row), encoding, tuple(request.split()), next(iter(answer.split()), ""), row.tools)


def _without_rare_openings(seen: Sequence[_RowFeatures]) -> list[_RowFeatures]:
    """Merge rare first words: if every answer begins differently, chance alone makes `telling` large."""
    counts = Counter(each.opening for each in seen)
    return [each if counts[each.opening] >= enough(seen) else each._replace(opening="") for each in seen]


def _frames(seen: Sequence[_RowFeatures]) -> list[MinedDisguise]:
    """Return the system prompts and encodings that rows share."""
    groups: dict[tuple[str, Encoding | None], list[_RowFeatures]] = defaultdict(list)
    for each in seen:
        groups[_text(each.context), each.encoding].append(each)
    everywhere = _openings(seen)
    return [
        MinedDisguise(
            rows[0].context,
            encoding=encoding,
            share=len(rows) / len(seen),
            telling=_telling(rows, everywhere),
            tools=_tools(rows),
        )
        for (system, encoding), rows in groups.items()
        if len(rows) >= enough(seen) and (system or encoding)
    ]


def _edges(seen: Sequence[_RowFeatures], side: Literal["start", "end"]) -> list[MinedDisguise]:
    """Return the shared beginnings or endings, each with the frame that most of its rows have."""
    having: dict[Words, list[_RowFeatures]] = {
        run: [] for run, _ in _frequent_runs([each.words for each in seen], side, LONGEST)
    }
    for each in seen:
        for n in range(1, min(LONGEST, len(each.words)) + 1):
            if (rows := having.get(_edge(each.words, side, n))) is not None:
                rows.append(each)
    everywhere, found = _openings(seen), []
    for run, rows in having.items():
        frame = Counter((_text(each.context), each.encoding) for each in rows).most_common(1)[0][0]
        typical = next(each for each in rows if (_text(each.context), each.encoding) == frame)
        share, text = len(rows) / len(seen), " ".join(run)
        telling = _telling(rows, everywhere)
        disguise = MinedDisguise(
            typical.context, encoding=typical.encoding, share=share, telling=telling, tools=_tools(rows)
        )
        found.append(replace(disguise, before=text) if side == "start" else replace(disguise, after=text))
    return found


def _tools(rows: Sequence[_RowFeatures]) -> tuple[Message, ...]:
    """Return the tools of one of these rows, if most of them have any."""
    having = [each.tools for each in rows if each.tools]
    return having[len(having) // 2] if 2 * len(having) > len(rows) else ()


def _frequent_runs(texts: Sequence[Words], side: Literal["start", "end"], longest: int) -> list[tuple[Words, int]]:
    """Return (run of words, count) at one end of many texts, more frequent than by chance, most frequent first.

    A run is left out if nearly all of its texts share a longer one. A whole text is no run.
    """
    words = Counter(word for text in texts for word in text)
    total, least = sum(words.values()), enough(texts)
    counts = Counter(_edge(text, side, n) for text in texts for n in range(1, min(longest, len(text) - 1) + 1))
    frequent = {run: n for run, n in counts.items() if n >= least}
    # The shorter run is redundant if nearly all its texts continue in the same way.
    inner = {shorter for run, n in frequent.items() if n >= SAME * counts[shorter := _edge(run, side, len(run) - 1)]}
    found = []
    for run, n in frequent.items():
        chance = math.prod(words[word] / total for word in run)
        if run not in inner and n / len(texts) >= MIN_LIFT * chance:
            found.append((run, n))
    return sorted(found, key=lambda each: (-each[1], each[0]))


def _edge(words: Words, side: Literal["start", "end"], n: int) -> Words:
    return words[:n] if side == "start" else words[len(words) - n :]


def _openings(rows: Sequence[_RowFeatures]) -> Counter[str]:
    return Counter(each.opening for each in rows)


def _telling(some: Sequence[_RowFeatures], everywhere: Counter[str]) -> float:
    here, every = _openings(some), everywhere.total()
    return sum(n / len(some) * math.log(n / len(some) * every / everywhere[word]) for word, n in here.items())


def _text(context: Iterable[Message]) -> str:
    return "".join(turn["content"] for turn in context)
