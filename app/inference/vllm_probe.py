"""Whether a server answers with the adapter that it was told to load: its first tokens beside our own engine's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from app.inference.archives import NotServed
from app.inference.engine_process import Stream
from app.inference.protocol import Ask

KNOWN = 20  # likeliest first tokens that our own engine tells
_PROBES = ("What is 2 + 3?", "Write one sentence about the sea.", "Name a color.")
_ASKED = 5  # of the server, as many as its interface has
_TOLERANCE = 0.25  # nats, of a log probability: the server may compute in bfloat16
Likely = Mapping[str, float]


@dataclass
class Comparison:
    """The largest differences of log probabilities, in nats, over the probes that could be compared."""

    to_adapter: float = 0.0  # of the server's answers
    to_base: float = 0.0  # of the adapter's, by our own engine
    compared: int = 0

    def add(self, found: Likely, own: Likely, base: Likely) -> None:
        """Add what the server, and our engine with the adapter and without it, make of one probe."""
        if own:  # else the adapter ends its reply at once
            self.compared += 1
            self.to_adapter = max(self.to_adapter, _distance(found, own))
            self.to_base = max(self.to_base, _distance(base, own))

    def check(self) -> None:
        """Raise `NotServed` unless the server is near the adapter, and far nearer than the base model is."""
        if not self.compared:
            raise NotServed("The server's adapter is not proved: it ends every reply at once.")
        if not self.to_adapter <= _TOLERANCE or not self.to_adapter < self.to_base / 2:
            away = f"{self.to_adapter:.2g} nats away from the adapter's, the base model's {self.to_base:.2g}"
            raise NotServed(f"The server's adapter is not proved: its first tokens are {away}.")


def probes() -> Iterator[Ask]:
    """Yield what is asked, of the server and of our own engine."""
    for prompt in _PROBES:
        yield {
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
            "top_logprobs": _ASKED,
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


def _distance(a: Likely, b: Likely) -> float:
    """How far the tokens in both are apart; infinite where few are in both."""
    both = a.keys() & b.keys()
    return max(abs(a[each] - b[each]) for each in both) if len(both) > _ASKED // 2 else float("inf")
