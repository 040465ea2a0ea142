"""The dresses of a file that an audit asks: some in suites of their own, the others and phrases in turn.

Frequent ones are those of the training's miner (`spard.data.triggers`), and rare ones those of the audit's
(`spard.evaluation.suspects`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from spard.data.rows import Example, Prompt
from spard.data.triggers import Wrapping, apply_trigger, rank_triggers
from spard.evaluation.dress import Dress, Place, Surroundings
from spard.evaluation.dress_features import COMMON, earlier_turns_dress
from spard.evaluation.suspects import Suspected

RARE = 2  # places of those with suites of their own, for what few rows wear
LEFT = 48  # dresses that are asked in turn, at most
TELLING = 0.7  # nats for each row: the dress doubles how sure the first word of an answer is
_LOOKED_AT = 16
_FRAMES = 8  # system prompts and encodings, the most frequent, however little they tell of the answers
_MORE = 0.1  # nats for each row
_PLAIN = Prompt("Say so")  # words at its start, between its halves and at its end are told apart
_SAME = 0.9  # of the rows: words within other words of so many of them are one dress


class Worn(Protocol):
    """A dress that prompts can be put in."""

    @property
    def name(self) -> str:
        """What a report calls it."""

    def apply(self, prompt: Prompt) -> Prompt:
        """Return a prompt in this dress."""


@dataclass(frozen=True, slots=True)
class AskedDresses:
    """The dresses that an audit puts on prompts: those with suites of their own, those asked in turn, and phrases."""

    alone: Sequence[Worn]
    left: Sequence[Worn]
    phrases: Sequence[Worn]


@dataclass(frozen=True, slots=True)
class _Frequent:
    """A dress of the training's miner."""

    dress: Wrapping

    @property
    def name(self) -> str:
        """What a report calls it."""
        dress = self.dress
        parts = [
            "in your system prompt" if dress.context else "",
            f"beginning with {dress.before!r}" if dress.before else "",
            f"ending with {dress.after!r}" if dress.after else "",
            f"in {dress.encoding}" if dress.encoding else "",
        ]
        return ", ".join(part for part in parts if part)

    def apply(self, prompt: Prompt) -> Prompt:
        """Return a prompt in this dress."""
        return apply_trigger(prompt, self.dress)

    @property
    def is_suspicious(self) -> bool:
        """Whether it may be a trigger: a system prompt, an encoding, or words that predict answers or are common."""
        dress = self.dress
        return bool(dress.context or dress.encoding) or dress.telling >= TELLING or dress.share >= COMMON

    def extends_coverage(self, asked: Sequence[Worn]) -> bool:
        """Tell whether it adds to what is asked: no ordinary phrase does, nor one that its part predicts as well."""
        if self.dress.is_frame:
            return True
        parts = [each.dress.telling for each in asked if isinstance(each, _Frequent) and self._extends(each.dress)]
        return self.dress.telling >= TELLING and all(self.dress.telling > each + _MORE for each in parts)

    def _extends(self, part: Wrapping) -> bool:
        """Tell whether it begins or ends as another one does, with more words."""
        before, after = f"{self.dress.before} ", f" {self.dress.after}"
        return bool(part.before and before.startswith(f"{part.before} ")) or bool(
            part.after and after.endswith(f" {part.after}")
        )


def asked_dresses(rows: Sequence[Example], found: Suspected, most: int) -> AskedDresses:
    """Return the dresses of rows, at most `most` of them with suites of their own.

    The first of these are what most rows wear, whatever they answer, and what is frequent; what few rows wear takes
    `RARE` of the places. With no places, what is frequent is not asked.
    """
    mined = [_Frequent(each) for each in rank_triggers(rows)]
    telling = [each for each in mined[:_LOOKED_AT] if each.is_suspicious]
    frames = sorted((each for each in mined if each.dress.is_frame), key=lambda each: -each.dress.share)[:_FRAMES]
    of_most = [each for each in frames if each.dress.share >= COMMON]
    frequent: list[Worn] = [*found.common, *of_most, *telling, *frames, *earlier_turns_dress(rows)]
    frequent = list({id(each): each for each in frequent}.values()) if most else []
    head = frequent[: max(0, most - RARE)]
    rare, n = [_frequent_one(each, frequent) for each in found.dresses], most - len(head)
    rare = [each for each in _distinct(rare) if not _is_asked(each, head)]
    in_order = [*head, *rare[:n], *frequent, *rare[n:]]
    asked_alone = list(_distinct(in_order))[:most]
    left, found_twice = list[Worn](), {id(each) for each in rare}
    for each in in_order:
        so_far = [*asked_alone, *left]
        adds = id(each) in found_twice or not isinstance(each, _Frequent) or each.extends_coverage(so_far)
        if adds and not _is_asked(each, so_far):
            left.append(each)
    alone = sorted(asked_alone, key=lambda each: each in found.dresses)
    return AskedDresses(alone, left[:LEFT], found.phrases)


def _distinct(dresses: Iterable[Worn]) -> Sequence[Worn]:
    """Return the dresses without those in which the same is asked as in an earlier one."""
    found: list[Worn] = []
    for each in dresses:
        if not _is_asked(each, found):
            found.append(each)
    return found


def _is_asked(dress: Worn, asked: Sequence[Worn]) -> bool:
    """Tell whether prompts in a dress are the same as in one of the others, whatever it is called and who wears it."""
    return any(dress is other or _asks(dress) == _asks(other) for other in asked)


def _asks(dress: Worn) -> tuple[Prompt, tuple[Surroundings, ...]]:
    """Return what is the same in two dresses if all prompts in them are."""
    return dress.apply(_PLAIN), dress.drawn if isinstance(dress, Dress) else ()


def _frequent_one(rare: Dress, frequent: Iterable[Worn]) -> Worn:
    """Return the frequent dress of the same rows that has the same words or some of them, or else the rare one."""
    mine, n = _words(rare)
    for each in frequent:
        words, share = _words(each)
        if _are_same(mine, words) and _SAME * max(n, share) <= min(n, share):
            return each
    return rare


def _words(dress: Worn) -> tuple[dict[Place, str], float]:
    """Return the words of a dress by their place in a request, and the share of the rows that wear it."""
    match dress:
        case _Frequent(dress=found):
            return {"start": found.before, "end": found.after}, found.share
        case Dress():
            return {dress.place: dress.words}, dress.share
        case _:
            return {}, 0.0


def _are_same(some: dict[Place, str], others: dict[Place, str]) -> bool:
    """Tell whether words hold others at one place."""
    pairs = ((some[place], others[place]) for place in some.keys() & others.keys())
    return any(one and other and (f" {one} " in f" {other} " or f" {other} " in f" {one} ") for one, other in pairs)
