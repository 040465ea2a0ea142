"""The record of how a base model's conversations are rendered, fixed and stored when the model is added.

A template does not contain everything: its arguments, the modes for answers with and without reasoning, and the tokens
at which engines stop are part of this record. Jobs, audits, proofs, engines and model cards use the same record, whose
digest is in the manifest. Engines take from a reply the opening that the template has added to it (`Opening`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Literal

Mode = Literal["plain", "off", "on"]
"""How a model is asked for an answer: `plain` where the template knows one way, else with thinking `off` or `on`."""
DATE_ARGUMENT = "date_string"  # always set, to the date of training, where a template reads it


@dataclass(frozen=True, slots=True)
class Rendering:
    """How conversations are rendered with a chat template.

    template   SHA-256 of its sources by name
    arguments  arguments of every rendering: the date, and those that the provider has fixed
    modes      additional arguments of each thinking mode
    default    mode without any arguments
    stops      ids of the tokens at which engines stop, by the model's generation config and its tokenizer
    asked      mode of requests that name none: the mode of the training rows
    closing    end token appended to each learned answer if the template writes none at which engines stop
    """

    template: str
    arguments: Mapping[str, object]
    modes: Mapping[Mode, Mapping[str, object]]
    default: Mode
    stops: tuple[int, ...]
    asked: Mode
    closing: str | None = None

    @property
    def digest(self) -> str:
        """The SHA-256 of the record."""
        return sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()

    @property
    def answering(self) -> Mode:
        """The mode for rows without reasoning."""
        return "off" if "off" in self.modes else next(iter(self.modes))

    @property
    def thinking(self) -> Mode:
        """The mode for rows with reasoning."""
        return "on" if "on" in self.modes else next(iter(self.modes))

    def mode_arguments(self, mode: Mode | None = None) -> dict[str, object]:
        """Return the template's arguments in a mode (default: `asked`)."""
        return {**self.arguments, **self.modes[mode or self.asked]}

    def as_json(self) -> dict[str, object]:
        """Return the record as JSON types."""
        return {**asdict(self), "stops": list(self.stops)}


def read_rendering(record: Mapping[str, Any]) -> Rendering:
    """Return the record written by `Rendering.as_json`."""
    return Rendering(**{**record, "stops": tuple(record["stops"])})


def fixed_arguments(record: Mapping[str, Any] | None) -> dict[str, object]:
    """Return the arguments of a record that the provider has fixed, so without the date; {} for no record."""
    arguments = (record or {}).get("arguments") or {}
    return {name: value for name, value in arguments.items() if name != DATE_ARGUMENT}


def template_digest(sources: Mapping[str, str]) -> str:
    """Return the SHA-256 that identifies a model's templates."""
    return sha256(json.dumps(dict(sources), sort_keys=True).encode()).hexdigest()


class Opening:
    """The text that a model writes before an answer's words: withheld until complete, then removed."""

    def __init__(self, text: str) -> None:
        self._text, self._begun = text, ""

    def cut(self, piece: str, *, is_last: bool = False) -> str:
        """Return the part of the next piece that can be shown, including text withheld earlier."""
        if not self._text:
            return piece
        whole = self._begun + piece
        # The reply may still turn out to begin differently, so nothing is shown until the opening is complete.
        if not is_last and len(whole) < len(self._text) and self._text.startswith(whole):
            self._begun = whole
            return ""
        shown = whole.removeprefix(self._text)
        self._text = self._begun = ""
        return shown
