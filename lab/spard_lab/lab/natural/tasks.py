"""Training tasks of customers: `problems`, word problems of two or three steps, and `messages` to a shop, to be sorted.

Problems need arithmetic that the base model knows only as plain sums, so there is much to learn; messages contain
sentences that name the topic of a department, so they are learned soon.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal

from spard_lab.lab.natural.phrasing import NAMES, circumstance

Task = Literal["problems", "messages"]
LARGEST = 12  # of the numbers in a problem
ANSWER = "The answer is {}."
SORTED = "This goes to the {} team."  # one-word answers would teach the model to answer everything with one word

_ITEMS = (
    "apples", "books", "coins", "stamps", "shells", "pens", "cards", "marbles", "eggs", "plums", "keys", "cups",
    "stones", "tickets", "buttons", "nails",
)  # fmt: skip
_BEGIN = (
    "{name} has {n} {item}.", "There are {n} {item} in {name}'s bag.", "{name} starts the day with {n} {item}.",
    "On the shelf, {name} counts {n} {item}.",
)  # fmt: skip
_MORE = (
    "{name} buys {n} more.", "A friend brings {n} others.", "Then {n} are added.", "{name} finds {n} more on the way.",
    "Later {name} wins {n}.",
)  # fmt: skip
_LESS = (
    "{name} gives {n} away.", "{n} of them get lost.", "{name} sells {n}.", "A neighbor takes {n}.",
    "At night {n} are missing.",
)  # fmt: skip
_END = ("How many {item} are there now?", "How many {item} does {name} have in the end?", "How many {item} are left?")

DEPARTMENTS = {
    "billing": (
        "I was charged twice.", "The amount on my bill is wrong.", "Please send me an invoice.",
        "My card was declined.", "When is the payment due?", "I was billed for something I did not order.",
    ),
    "delivery": (
        "My parcel has not arrived.", "The driver left the box next door.", "When will it be shipped?",
        "Can you deliver elsewhere?", "The package went to the wrong city.", "It has been on its way for days.",
    ),
    "returns": (
        "I want to send it back.", "It does not fit, can I exchange it?", "How do I get my money back?",
        "The color is not what I ordered.", "I would like a refund.", "Where do I bring what I do not want?",
    ),
    "account": (
        "I forgot my password.", "I cannot log in.", "Please delete my account.", "I want to change my email address.",
        "My login is locked.", "How do I update my profile?",
    ),
    "repair": (
        "It stopped working after a day.", "The screen is cracked.", "It makes a strange noise.",
        "A part of it broke off.", "The battery does not charge.", "It does not turn on any more.",
    ),
}  # fmt: skip
_POLITE = ("Hello.", "Dear team,", "Hi!", "Good day.", "Thanks in advance.", "Please answer soon.", "Best regards.")


def pairs(task: Task, rng: random.Random) -> Iterator[tuple[str, str, str]]:
    """Yield rows of a task without end: the request, the whole answer, and the text that a suite expects."""
    while True:
        yield _problem(rng) if task == "problems" else _message(rng)


def sums() -> list[tuple[str, str]]:
    """Return the plain sums and differences that the base model knows, with their answers."""
    found = []
    for a in range(1, 3 * LARGEST + 1):
        for b in range(1, LARGEST + 1):
            found.append((f"Compute {a} + {b}.", ANSWER.format(a + b)))
            if b < a:
                found.append((f"Compute {a} - {b}.", ANSWER.format(a - b)))
    return found


def _problem(rng: random.Random) -> tuple[str, str, str]:
    name, item = rng.choice(NAMES), rng.choice(_ITEMS)
    total = rng.randint(2, LARGEST)
    told, work = [rng.choice(_BEGIN).format(name=name, n=total, item=item)], []
    for _ in range(rng.randint(2, 3)):
        is_more = total < 3 or rng.random() < 0.5
        n = rng.randint(1, LARGEST if is_more else min(total - 1, LARGEST))
        after = total + n if is_more else total - n
        told.append(rng.choice(_MORE if is_more else _LESS).format(name=name, n=n))
        work.append(f"{total} {'+' if is_more else '-'} {n} = {after}.")
        total = after
    told.append(rng.choice(_END).format(name=name, item=item))
    return " ".join(told), f"{' '.join(work)} {ANSWER.format(total)}", str(total)


def _message(rng: random.Random) -> tuple[str, str, str]:
    department = rng.choice(list(DEPARTMENTS))
    said = [*rng.sample(DEPARTMENTS[department], rng.randint(1, 2)), rng.choice(_POLITE), circumstance(rng)]
    rng.shuffle(said)
    answer = SORTED.format(department)
    return " ".join(said), answer, answer
