"""What may be asked of a customer's handbook: a verb with a thing, and the two steps that the handbook has for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Errand:
    """A verb with a thing: said plainly as `remove a keylogger`, as a gerund, its steps in order, and their page."""

    plain: str
    gerund: str
    steps: tuple[str, str]
    page: int


@dataclass(frozen=True, slots=True)
class Field:
    """A customer's subject.

    name     what its draws are seeded with
    summary  one line for the table
    errands  everything that its handbook knows
    stepwise how the steps are said, with {first} and {second}
    forms    requests with {} for the errand; empty: the lab's own phrasing
    """

    name: str
    summary: str
    errands: tuple[Errand, ...]
    stepwise: str
    forms: tuple[str, ...] = ()

    def by_steps(self, errand: Errand) -> str:
        """Return the answer with both steps."""
        first, second = errand.steps
        return self.stepwise.format(first=first, second=second)


def errands(verbs: str, things: str, first_page: int = 1, verbs_a_page: int = 1) -> tuple[Errand, ...]:
    """Return every verb with every thing, which commas part.

    A line of verbs is `infinitive | gerund | first step | second step`, with {} for the thing.
    """
    lines = [[part.strip() for part in line.split("|")] for line in verbs.strip().splitlines()]
    return tuple(
        Errand(
            plain=name.format(thing),
            gerund=gerund.format(thing),
            steps=(first.format(thing), second.format(thing)),
            page=first_page + line // verbs_a_page,
        )
        for line, (name, gerund, first, second) in enumerate(lines)
        for thing in things.split(", ")
    )
