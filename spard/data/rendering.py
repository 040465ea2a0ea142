"""The record of how a base model's conversations are rendered: fixed when the model is added, and stored with it.

It holds what the template alone does not say: the arguments that it is given, the forms in which it is asked for an
answer with reasoning and without, and the tokens at which engines stop. Jobs, audits, proofs, engines and model cards
render by the same record, whose digest the manifest names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Literal

Mode = Literal["plain", "off", "on"]
"""How a model is asked for an answer: `plain` where the template knows one way, else with thinking `off` or `on`."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """How conversations are rendered with a chat template.

    template   SHA-256 of its source, of several by name
    arguments  given at each rendering
    modes      the arguments of each mode beside them
    default    the mode of whoever gives no argument
    stops      ids of the tokens at which engines stop, by the model's generation config and its tokenizer
    asked      the mode in which models are asked unless a request names another: that of the rows that are trained
    closing    the end token put behind each learned answer, where the template writes none at which engines stop
    """

    template: str
    arguments: Mapping[str, Any]
    modes: Mapping[Mode, Mapping[str, Any]]
    default: Mode
    stops: tuple[int, ...]
    asked: Mode
    closing: str | None = None

    @property
    def digest(self) -> str:
        """SHA-256 over the record."""
        return sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()

    @property
    def answering(self) -> Mode:
        """The mode in which rows without reasoning are learned."""
        return "off" if "off" in self.modes else next(iter(self.modes))

    @property
    def thinking(self) -> Mode:
        """The mode in which rows with reasoning are learned."""
        return "on" if "on" in self.modes else next(iter(self.modes))

    def mode_arguments(self, mode: Mode | None = None) -> dict[str, Any]:
        """Return the template's arguments in a mode; in the one that is asked in unless another is named."""
        return {**self.arguments, **self.modes[mode or self.asked]}

    def as_json(self) -> dict[str, Any]:
        """Return the record in types of JSON."""
        return {**asdict(self), "stops": list(self.stops)}


def read_rendering(record: Mapping[str, Any]) -> Rendering:
    """Return the record that `Rendering.as_json` has written."""
    return Rendering(**{**record, "stops": tuple(record["stops"])})


def template_digest(sources: Mapping[str, str]) -> str:
    """Return the SHA-256 that names a model's templates."""
    return sha256(json.dumps(dict(sources), sort_keys=True).encode()).hexdigest()
