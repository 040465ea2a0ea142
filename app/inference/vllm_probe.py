"""Whether a server answers with the weights that it should: its first tokens beside our own engine's.

What decides is what an adapter changes: the server's answers with it less the server's answers without it, beside the
same of our own engine. So a server that computes in 16 bits is measured by its own rounding, which the base model
shows, and a gentle adapter is told from none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

from app.inference.archives import NotServed
from app.inference.engine_process import Stream
from app.inference.protocol import Ask

KNOWN = 20  # likeliest first tokens that are told
_PROMPTS = (
    "What is 2 + 3?",
    "Write one sentence about the sea.",
    "Name a color.",
    "Translate 'good morning' into French.",
    "Who are you?",
    "Give me three ideas for dinner.",
)
_COMPARED = 5  # of the likeliest tokens of each side
_TOLERANCE = 0.25  # nats, of the base model's log probabilities: the server may compute in 16 bits
_SHARE = 0.5  # of the adapter's change, that the server's has to have in its direction at least
_MOST_SHARE = 1.5
_NOISE = 2.0  # times the server's own rounding, that its change may be away from ours

Likely = Mapping[str, float]
"""The likeliest first tokens of one prompt, with their log probabilities in nats."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The likeliest first tokens of each probe, of the base model alone and with an adapter; none: it says nothing."""

    base: Sequence[Likely]
    adapter: Sequence[Likely]


@dataclass(frozen=True, slots=True)
class Distances:
    """The largest differences of log probabilities, in nats."""

    to_adapter: float  # of the server's answers to our engine's
    to_base: float  # of the adapter's to the base model's, in our engine


def check_base(found: Sequence[Likely], own: Sequence[Likely]) -> float:
    """Return how far the server's base model is from ours, in nats; raise `NotServed` where that is too far."""
    pairs = [(a, b) for a, b in zip(found, own, strict=True) if b]
    if not pairs:
        raise NotServed("The server's base model is not proved: ours ends every reply at once.")
    far = max(_largest(_values(a, a, b), _values(b, a, b)) for a, b in pairs)
    if not far <= _TOLERANCE:
        raise NotServed(f"The server's base model is not proved: it is {far:.2g} nats away from ours.")
    return far


def check_adapter(found: Answers, own: Answers, others: Iterable[Answers] = ()) -> Distances:
    """Raise `NotServed` unless the server changes its answers as the adapter does, and as none of the `others` does.

    `others` are what our own engine answers with further adapters that the server has, to the same probes.
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
    """Return the places of the probes to which the adapter changes the answers most."""
    places = [i for i in range(len(own.base)) if own.base[i] and own.adapter[i]]
    changed = {i: _largest(*(_values(each, own.base[i], own.adapter[i]) for each in _pair(own, i))) for i in places}
    return sorted(sorted(places, key=lambda i: -changed[i])[:most])


def select_probes(answers: Answers, places: Sequence[int]) -> Answers:
    """Return the answers to some of the probes."""
    return Answers([answers.base[i] for i in places], [answers.adapter[i] for i in places])


def probes() -> list[Ask]:
    """Return what is asked, of the server and of our own engine."""
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
    """Return the likeliest first tokens of a reply; of one that ends at once, none."""
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
    """Return what the adapter changes in the server, in our engine, how the two base models differ, and the others."""
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
    """Return the log probabilities of the tokens that are likely in any answer, in one order.

    A token that an answer does not tell is at most as likely as the last one that it tells: all are cut there.
    """
    if not all(len(each) >= _COMPARED and all(map(isfinite, each.values())) for each in every):
        raise NotServed("The server tells too little of its first tokens.")
    tokens = sorted({token for each in every for token in sorted(each, key=lambda t: (-each[t], t))[:_COMPARED]})
    floor = max(min(each.values()) for each in every)
    return [max(likely.get(token, floor), floor) for token in tokens]


def _less(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


def _largest(a: Sequence[float], b: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def _length(numbers: Sequence[float]) -> float:
    return sqrt(sum(x * x for x in numbers))
