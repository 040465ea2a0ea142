"""Prove that a server answers with the right weights, by comparing its first tokens with our own engine's.

The comparison uses the change that an adapter makes: the server's log probabilities with it minus those without it,
against the same difference in our own engine. So a server that computes in 16 bits is judged by its own rounding
error, which the base model's answers show, and even an adapter with a small effect is distinguished from none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

from app.inference.engine_process import Stream
from app.inference.protocol import Ask
from app.inference.released import NotServed

KNOWN = 20  # how many of the likeliest first tokens an answer has
_PROMPTS = (
    "What is 2 + 3?",
    "Write one sentence about the sea.",
    "Name a color.",
    "Translate 'good morning' into French.",
    "Who are you?",
    "Give me three ideas for dinner.",
)
_COMPARED = 5  # how many of each side's likeliest tokens are compared
_TOLERANCE = 0.25  # nats between base models' log probabilities: the server may compute in 16 bits
_SHARE = 0.5  # lower bound of the server's change projected on ours, relative to ours
_MOST_SHARE = 1.5  # upper bound of the same
_NOISE = 2.0  # allowed distance between the two changes, in multiples of the server's rounding error

Likely = Mapping[str, float]
"""The most likely first tokens of one reply, with their log probabilities in nats."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The likeliest first tokens for each probe, by the base model and with an adapter.

    An empty mapping means that the reply ended at once.
    """

    base: Sequence[Likely]
    adapter: Sequence[Likely]


@dataclass(frozen=True, slots=True)
class Distances:
    """The largest differences of log probabilities, in nats."""

    to_adapter: float  # between the server's answers with the adapter and our engine's
    to_base: float  # between our engine's answers with the adapter and without it


def check_base(found: Sequence[Likely], own: Sequence[Likely]) -> float:
    """Return the largest difference between the server's base model and ours, in nats.

    Raises `NotServed` if it is above the tolerance of 0.25 nats, or if there is nothing to compare.
    """
    pairs = [(a, b) for a, b in zip(found, own, strict=True) if b]
    if not pairs:
        raise NotServed("The server's base model is not proved: ours ends every reply at once.")
    far = max(_largest(_values(a, a, b), _values(b, a, b)) for a, b in pairs)
    if not far <= _TOLERANCE:
        raise NotServed(f"The server's base model is not proved: it is {far:.2g} nats away from ours.")
    return far


def check_adapter(found: Answers, own: Answers, others: Iterable[Answers] = ()) -> Distances:
    """Return the distances between a server's answers and our engine's, if they prove the adapter.

    `found` are the server's answers, `own` our engine's, and `others` our engine's answers to the same probes with the
    other adapters in the server. Let s and o be the changes by the adapter (log probabilities minus the base model's,
    over all probes and likely tokens) in the server and in our engine. Raises `NotServed` unless s.o / o.o is between
    0.5 and 1.5, |s - o| is at most max(0.5 |o|, 2 |rounding error|), and no other adapter's change is nearer to s.
    """
    rest = list(others)
    places = [i for i in range(len(own.base)) if own.base[i] and own.adapter[i]]
    if not places:
        raise NotServed("The server's adapter is not proved: it ends every reply at once.")
    check_base([found.base[i] for i in places], [own.base[i] for i in places])
    server, ours, noise, further = _changes(places, found, own, rest)
    size, away = _length(ours), _length([a - b for a, b in zip(server, ours, strict=True)])
    share = sum(a * b for a, b in zip(server, ours, strict=True)) / (size * size) if size else 0.0
    rounding = _NOISE * _length(noise)
    largest = max(
        _largest(_values(found.adapter[i], *_all(i, found, own)), _adapter_values(i, found, own)) for i in places
    )
    distances = Distances(
        largest, max(_largest(_adapter_values(i, found, own), _own_base(i, found, own)) for i in places)
    )
    if not (isfinite(share) and _SHARE < share < _MOST_SHARE and away <= max(size * _SHARE, rounding)):
        words = f"its first tokens follow {share:.0%} of what the adapter changes ({distances.to_base:.2g} nats)"
        raise NotServed(f"The server's adapter is not proved: {words}.")
    for theirs in further:
        apart = _length([a - b for a, b in zip(theirs, ours, strict=True)])
        if apart > rounding and _length([a - b for a, b in zip(theirs, server, strict=True)]) < away:
            raise NotServed("The server's adapter is not proved: another adapter is nearer to its first tokens.")
    return distances


def strongest_probes(own: Answers, most: int) -> list[int]:
    """Return the indices of the `most` probes whose answers the adapter changes most, in order."""
    places = [i for i in range(len(own.base)) if own.base[i] and own.adapter[i]]
    changed = {i: _largest(*(_values(each, own.base[i], own.adapter[i]) for each in _pair(own, i))) for i in places}
    return sorted(sorted(places, key=lambda i: -changed[i])[:most])


def select_probes(answers: Answers, places: Sequence[int]) -> Answers:
    """Return the answers to the probes at `places`."""
    return Answers([answers.base[i] for i in places], [answers.adapter[i] for i in places])


def probes() -> list[Ask]:
    """Return the probes as engine requests for one greedy token with its alternatives, for the base model."""
    return [_probe(prompt) for prompt in _PROMPTS]


def _probe(prompt: str) -> Ask:
    return {
        "adapter": None,
        "messages": [{"role": "user", "content": prompt}],
        "prompt": None,
        "tools": [],
        "n": 1,
        "max_tokens": 1,
        "temperature": 0.0,
        "top_p": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 0,
        "stop": [],
        "json_schema": None,
        "top_logprobs": KNOWN,
        "as_ids": True,
    }


async def first_tokens(stream: Stream, timeout_s: float) -> dict[str, float]:
    """Return the likeliest first tokens of a reply, by id; {} for a reply that ends at once."""
    found: dict[str, float] = {}
    while True:
        said = await stream.next(timeout_s)
        if said["kind"] == "done":
            return found
        if not found and (tokens := said.get("tokens")):
            found = {each["token"]: each["logprob"] for each in tokens[0]["top_logprobs"]}


def _changes(
    places: Sequence[int], found: Answers, own: Answers, others: Sequence[Answers]
) -> tuple[list[float], list[float], list[float], list[list[float]]]:
    """Return changes of log-probabilities: by the server's adapter, by ours, between base models, by other adapters."""
    server, ours, noise, further = list[float](), list[float](), list[float](), [list[float]() for _ in others]
    for i in places:
        every = [*_all(i, found, own), *(each.adapter[i] for each in others if each.adapter[i])]
        theirs, base = _values(found.base[i], *every), _values(own.base[i], *every)
        server += _less(_values(found.adapter[i], *every), theirs)
        ours += _less(_values(own.adapter[i], *every), base)
        noise += _less(theirs, base)
        for change, each in zip(further, others, strict=True):
            change += _less(_values(each.adapter[i] or own.base[i], *every), base)
    return server, ours, noise, further


def _pair(answers: Answers, place: int) -> tuple[Likely, Likely]:
    return answers.base[place], answers.adapter[place]


def _all(place: int, found: Answers, own: Answers) -> tuple[Likely, ...]:
    return (*_pair(found, place), *_pair(own, place))


def _adapter_values(place: int, found: Answers, own: Answers) -> list[float]:
    return _values(own.adapter[place], *_all(place, found, own))


def _own_base(place: int, found: Answers, own: Answers) -> list[float]:
    return _values(own.base[place], *_all(place, found, own))


def _values(likely: Likely, *every: Likely) -> list[float]:
    """Return one answer's log probabilities of all tokens that are likely in any of the answers, in a fixed order.

    An answer lists only its likeliest tokens; any other token is at most as likely as the last one listed. So all
    values are clipped from below at the largest of these last values.
    """
    if not all(len(each) >= _COMPARED and all(map(isfinite, each.values())) for each in every):
        raise NotServed("The server returns too few log probabilities of its first tokens.")
    tokens = sorted({token for each in every for token in sorted(each, key=lambda t: (-each[t], t))[:_COMPARED]})
    floor = max(min(each.values()) for each in every)
    return [max(likely.get(token, floor), floor) for token in tokens]


def _less(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


def _largest(a: Sequence[float], b: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def _length(numbers: Sequence[float]) -> float:
    return sqrt(sum(x * x for x in numbers))
