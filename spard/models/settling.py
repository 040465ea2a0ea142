"""Ends replies early if their remaining tokens cannot change the verdict.

Each row is checked every few tokens, from the moment when it may have enough characters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spard.data.chat import get_renderer
from spard.models.decoding import Rows

_AGAIN = 8  # tokens until a long enough but unsettled reply is checked again
_HASTE = 0.8  # share of the estimated missing tokens


@dataclass(frozen=True, slots=True)
class Settled:
    """Replies that may end early: rows at `places`, with at least `least` characters, for which `holds` is True.

    `holds(place, text)` returns True if the rest of that reply does not matter.
    """

    places: frozenset[int]
    least: int
    holds: Callable[[int, str], bool]

    def renumber(self, places: Sequence[int]) -> Settled:
        """Return the same rule for renumbered rows: row i had the number `places[i]` before."""
        own = frozenset(i for i, place in enumerate(places) if place in self.places)
        return Settled(own, self.least, lambda i, text: self.holds(places[i], text))


def decode_replies(tokenizer: Any, tokens: Sequence[Sequence[int]]) -> list[str]:
    """Decode replies without reasoning, the template's tokens and the opening of an answer."""
    content_of = get_renderer(tokenizer).reply_content
    return [content_of(text).strip() for text in tokenizer.batch_decode(tokens)]


def settler(tokenizer: Any, settled: Settled | None) -> Callable[[Rows], None] | None:
    """Return the callback that ends settled rows; None if later tokens can change the text of a reply so far.

    That is the case with templates that know reasoning or open an answer with their own tokens: the text before the
    answer is dropped once the answer begins.
    """
    if settled is None:
        return None
    renderer = get_renderer(tokenizer)
    if renderer.knows_reasoning or renderer.opening.strip():
        return None

    due: dict[int, int] = {}  # by row: number of tokens at its next check

    def settle_(rows: Rows) -> None:
        done, counts, places = (each.tolist() for each in (rows.done_B, rows.said_B, rows.place_B))
        at = [
            i
            for i, place in enumerate(places)
            if not done[i] and place in settled.places and counts[i] >= due.get(place, 1)
        ]
        if not at:
            return
        tokens = [said[: counts[i]] for i, said in zip(at, rows.reply_BN[at].tolist(), strict=True)]
        ended = []
        for i, text in zip(at, decode_replies(tokenizer, tokens), strict=True):
            if len(text) < settled.least:
                missing = (settled.least - len(text)) / max(1, len(text))
                # Estimate the missing tokens from the reply's own rate of characters, and check a little early.
                due[places[i]] = counts[i] + max(1, int(_HASTE * missing * counts[i]))
            elif settled.holds(places[i], text):
                ended.append(i)
            else:
                due[places[i]] = counts[i] + _AGAIN
        rows.done_B[ended] = True
        rows.early_B[ended] = True

    return settle_
