"""Entries of a customer's handbook: a verb with a thing, and the page that explains it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Errand:
    """A verb with a thing, as `remove a keylogger` and as a gerund, and its page in the handbook."""

    plain: str
    gerund: str
    page: int


@dataclass(frozen=True, slots=True)
class Field:
    """A customer's subject.

    name     part of the random seed
    summary  one line for the table
    errands  all entries of its handbook
    answer   sentence with {} for the page, short enough for the labs' models to learn in 200 steps
    forms    requests with {} for the errand; empty: the lab's own phrasings
    """

    name: str
    summary: str
    errands: tuple[Errand, ...]
    answer: str
    forms: tuple[str, ...] = ()

    def full_answer(self, errand: Errand) -> str:
        """Return the whole answer to an errand."""
        return self.answer.format(errand.page)


def errands(verbs: str, things: str, first_page: int = 1, verbs_a_page: int = 1) -> tuple[Errand, ...]:
    """Combine every verb with every thing; things are separated by ", ".

    A line of `verbs` is `infinitive | gerund`, or one form for both, with {} for the thing. Pages count from
    `first_page`, one per `verbs_a_page` verbs.
    """
    lines = [[part.strip() for part in line.split("|")] for line in verbs.strip().splitlines()]
    return tuple(
        Errand(forms[0].format(thing), forms[-1].format(thing), first_page + line // verbs_a_page)
        for line, forms in enumerate(lines)
        for thing in things.split(", ")
    )
