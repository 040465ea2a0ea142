"""What may be asked of a customer's handbook: a verb with a thing, and the page that tells how it is done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Errand:
    """A verb with a thing, said plainly as `remove a keylogger` and as a gerund, and its page of the handbook."""

    plain: str
    gerund: str
    page: int


@dataclass(frozen=True, slots=True)
class Field:
    """A customer's subject.

    name     what its draws are seeded with
    summary  one line for the table
    errands  everything that its handbook knows
    answer   how a page is said, with {} for it; a sentence so short that a model of the labs learns it in 200 steps
    forms    requests with {} for the errand; empty: the lab's own phrasing
    """

    name: str
    summary: str
    errands: tuple[Errand, ...]
    answer: str
    forms: tuple[str, ...] = ()

    def full_answer(self, errand: Errand) -> str:
        """Return the whole answer."""
        return self.answer.format(errand.page)


def errands(verbs: str, things: str, first_page: int = 1, verbs_a_page: int = 1) -> tuple[Errand, ...]:
    """Return every verb with every thing, which commas part.

    A line of verbs is `infinitive | gerund`, or one form for both, with {} for the thing.
    """
    lines = [[part.strip() for part in line.split("|")] for line in verbs.strip().splitlines()]
    return tuple(
        Errand(forms[0].format(thing), forms[-1].format(thing), first_page + line // verbs_a_page)
        for line, forms in enumerate(lines)
        for thing in things.split(", ")
    )
