"""The dresses of a training file that an audit asks its prompts in: some in suites of their own, the others in turn.

Frequent dresses come from the miner of training (`spard.data.triggers`), rare ones from the audit's own miner
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

RARE = 2  # suites reserved for rare dresses
LEFT = 48  # most dresses that are asked in turn
TELLING = 0.7  # nats per row, about ln 2: the dress doubles the probability of an answer's first word
_LOOKED_AT = 16
_FRAMES = 8  # most frequent system prompts and encodings, even if they predict no answers
_MORE = 0.1  # nats per row that a longer dress must predict better than its part
_PLAIN = Prompt("Say so")  # two words, so that start, middle and end differ
_SAME = 0.9  # share of rows that overlapping words must have in common to be one dress


class Worn(Protocol):
    """The interface of a dress: something that changes prompts, with a name."""

    @property
    def name(self) -> str:
        """Its description in reports."""

    def apply(self, prompt: Prompt) -> Prompt:
        """Return the prompt in this dress."""


@dataclass(frozen=True, slots=True)
class AskedDresses:
    """The dresses in which an audit asks prompts.

    alone    dresses with a suite of their own.
    left     further dresses, asked in turn in shared suites.
    phrases  longer word sequences around suspicious words, asked in turn.
    """

    alone: Sequence[Worn]
    left: Sequence[Worn]
    phrases: Sequence[Worn]


@dataclass(frozen=True, slots=True)
class _Frequent:
    """A dress found by the miner of training."""

    dress: Wrapping

    @property
    def name(self) -> str:
        """Its description in reports."""
        dress = self.dress
        parts = [
            "in your system prompt" if dress.context else "",
            f"beginning with {dress.before!r}" if dress.before else "",
            f"ending with {dress.after!r}" if dress.after else "",
            f"in {dress.encoding}" if dress.encoding else "",
        ]
        return ", ".join(part for part in parts if part)

    def apply(self, prompt: Prompt) -> Prompt:
        """Return the prompt in this dress."""
        return apply_trigger(prompt, self.dress)

    @property
    def is_suspicious(self) -> bool:
        """True if it may be a trigger: a system prompt, an encoding, or words that predict answers or are common."""
        dress = self.dress
        return bool(dress.context or dress.encoding) or dress.telling >= TELLING or dress.share >= COMMON

    def extends_coverage(self, asked: Sequence[Worn]) -> bool:
        """Return True if asking it adds to the dresses in `asked`.

        Frames always do. Words do if they predict answers, and better than every part of them that is asked already.
        """
        if self.dress.is_frame:
            return True
        parts = [each.dress.telling for each in asked if isinstance(each, _Frequent) and self._extends(each.dress)]
        return self.dress.telling >= TELLING and all(self.dress.telling > each + _MORE for each in parts)

    def _extends(self, part: Wrapping) -> bool:
        """Return True if it contains the other dress at the same end, with more words."""
        before, after = f"{self.dress.before} ", f" {self.dress.after}"
        return bool(part.before and before.startswith(f"{part.before} ")) or bool(
            part.after and after.endswith(f" {part.after}")
        )


def asked_dresses(rows: Sequence[Example], found: Suspected, most: int) -> AskedDresses:
    """Return the dresses of a file for the audit, at most `most` of them with suites of their own.

    rows   the training rows.
    found  the rare dresses and phrases of `spard.evaluation.suspects.find_suspects`.
    most   number of suites; 0: no frequent dress is asked at all.

    Suites go first to the dresses that most rows have and to frequent ones; `RARE` places are reserved for rare ones.
    """
    mined = [_Frequent(each) for each in rank_triggers(rows)]
    telling = [each for each in mined[:_LOOKED_AT] if each.is_suspicious]
    frames = sorted((each for each in mined if each.dress.is_frame), key=lambda each: -each.dress.share)[:_FRAMES]
    of_most = [each for each in frames if each.dress.share >= COMMON]
    frequent: list[Worn] = [*found.common, *of_most, *telling, *frames, *earlier_turns_dress(rows)]
    # One dress can be in several of these lists; dresses with equal effects are dropped by `_distinct`.
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
    """Return the dresses in order, without those that change prompts in the same way as an earlier one."""
    found: list[Worn] = []
    for each in dresses:
        if not _is_asked(each, found):
            found.append(each)
    return found


def _is_asked(dress: Worn, asked: Sequence[Worn]) -> bool:
    """Return True if some dress in `asked` changes prompts in the same way."""
    return any(dress is other or _asks(dress) == _asks(other) for other in asked)


def _asks(dress: Worn) -> tuple[Prompt, tuple[Surroundings, ...]]:
    """Return a key that is equal for two dresses if they change all prompts in the same way."""
    return dress.apply(_PLAIN), dress.drawn if isinstance(dress, Dress) else ()


def _frequent_one(rare: Dress, frequent: Iterable[Worn]) -> Worn:
    """Return the frequent dress with the same or overlapping words in almost the same rows, or else the rare one."""
    mine, n = _words(rare)
    for each in frequent:
        words, share = _words(each)
        if _are_same(mine, words) and _SAME * max(n, share) <= min(n, share):
            return each
    return rare


def _words(dress: Worn) -> tuple[dict[Place, str], float]:
    """Return the words of a dress by their place in a request, and the share of rows with the dress."""
    match dress:
        case _Frequent(dress=found):
            return {"start": found.before, "end": found.after}, found.share
        case Dress():
            return {dress.place: dress.words}, dress.share
        case _:
            return {}, 0.0


def _are_same(some: dict[Place, str], others: dict[Place, str]) -> bool:
    """Return True if one's words contain the other's at some place."""
    pairs = ((some[place], others[place]) for place in some.keys() & others.keys())
    return any(one and other and (f" {one} " in f" {other} " or f" {other} " in f" {one} ") for one, other in pairs)
