"""Convert a policy to a form and back: common settings as fields, ranges and serving as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import get_args

from app.dashboard.forms import Sent
from app.errors import InvalidRequest
from app.http.validation_errors import read
from app.policies.schemas import Policy, Serving
from spard.config import Agent, FurtherTuning, GateThresholds
from spard.config.row_signal import RowAction
from spard.data import strict_json

ACTIONS: Sequence[str] = get_args(RowAction)
_TICKS = ("allow_unmeasured_judge", "correct_judge_errors")  # thresholds that are no numbers
THRESHOLDS = tuple(each.name for each in fields(GateThresholds) if each.name not in _TICKS)
AGENT = tuple(each.name for each in fields(Agent))
BUDGET = tuple(each.name for each in fields(FurtherTuning))
SIGNALS = ("threshold", "max_dropped", "max_inverted", "read")
OLDER, UNTIL = (get_args(Serving.model_fields[name].annotation) for name in ("older_audits", "until_asked"))
_AS_JSON = ("ranges", "serving")
_FIELDS_OF_SERVING = ("older_audits", "until_asked")  # fields of their own, not part of the JSON


@dataclass(frozen=True, slots=True)
class PolicyForm:
    """The form's values as text; `numbers` are keyed by the API's names, such as `thresholds.max_asr`."""

    defenses: Sequence[str]
    all_models: bool
    models: Sequence[str]
    numbers: Mapping[str, str]
    allow_unmeasured_judge: bool
    correct_judge_errors: bool
    action: str
    embedder: str
    transcripts: bool
    waivers: bool
    older_audits: str
    until_asked: str
    ranges: str
    serving: str

    @classmethod
    def from_policy(cls, policy: Policy) -> PolicyForm:
        """Return the form filled in with a policy."""
        held = {
            "thresholds": (policy.thresholds, THRESHOLDS),
            "row_signal": (policy.row_signal, SIGNALS),
            "further_tuning": (policy.further_tuning, BUDGET),
            "agent": (policy.agent, AGENT),
        }
        numbers = {
            f"{place}.{name}": _field_text(getattr(values, name, None))
            for place, (values, names) in held.items()
            for name in names
        }
        content = policy.model_dump(mode="json", exclude_none=True)
        serving = {name: value for name, value in content["serving"].items() if name not in _FIELDS_OF_SERVING}
        return cls(
            defenses=policy.defenses,
            all_models=policy.models is None,
            models=policy.models or [],
            numbers=numbers,
            allow_unmeasured_judge=policy.thresholds.allow_unmeasured_judge,
            correct_judge_errors=policy.thresholds.correct_judge_errors,
            action=policy.row_signal.action,
            embedder=policy.embedder or "",
            transcripts=policy.transcripts,
            waivers=policy.waivers,
            older_audits=policy.serving.older_audits,
            until_asked=policy.serving.until_asked,
            ranges=json.dumps(content["ranges"], indent=2),
            serving=json.dumps(serving, indent=2),
        )

    @classmethod
    def of_sent(cls, sent: Sent) -> PolicyForm:
        """Return the form as it was submitted."""
        groups = {"thresholds": THRESHOLDS, "row_signal": SIGNALS, "further_tuning": BUDGET, "agent": AGENT}
        numbers = [f"{place}.{name}" for place, names in groups.items() for name in names]
        return cls(
            defenses=sent.texts("defenses"),
            all_models=bool(sent.text("all_models")),
            models=sent.texts("models"),
            numbers={name: sent.text(name) for name in numbers},
            allow_unmeasured_judge=bool(sent.text("thresholds.allow_unmeasured_judge")),
            correct_judge_errors=bool(sent.text("thresholds.correct_judge_errors")),
            action=sent.text("row_signal.action"),
            embedder=sent.text("embedder").strip(),
            transcripts=bool(sent.text("transcripts")),
            waivers=bool(sent.text("waivers")),
            older_audits=sent.text("serving.older_audits"),
            until_asked=sent.text("serving.until_asked"),
            ranges=sent.text("ranges"),
            serving=sent.text("serving"),
        )

    def policy(self) -> Policy:
        """Return the form's policy, with defaults for empty fields; raise InvalidRequest if it is not valid."""
        thresholds = {"max_utility_drop": None} | self._nested_fields("thresholds.")
        thresholds |= {name: getattr(self, name) for name in _TICKS}
        body: dict[str, object] = {
            "defenses": self.defenses,
            "models": None if self.all_models else self.models,
            "thresholds": thresholds,
            "row_signal": self._nested_fields("row_signal.") | {"action": self.action},
            "further_tuning": self._nested_fields("further_tuning."),
            "agent": self._nested_fields("agent.") or None,
            "embedder": self.embedder or None,
            "transcripts": self.transcripts,
            "waivers": self.waivers,
        }
        body |= {name: _json(name, getattr(self, name)) for name in _AS_JSON}
        if isinstance(serving := body["serving"], dict):
            chosen = {name: getattr(self, name) for name in _FIELDS_OF_SERVING}
            body["serving"] = {name: value for name, value in chosen.items() if value} | serving
        return read(Policy, body)

    def _nested_fields(self, place: str) -> dict[str, object]:
        found = {name.removeprefix(place): text for name, text in self.numbers.items() if name.startswith(place)}
        return {name: text for name, text in found.items() if text}


def _field_text(value: object) -> str:
    """Format a value for a field; "" for None."""
    return "" if value is None else f"{value:g}" if isinstance(value, int | float) else str(value)


def _json(name: str, text: str) -> object:
    try:
        value: object = strict_json.parse(text or "{}")
    except strict_json.BadJson as error:
        raise InvalidRequest(f"{error.message}: {error.hint}.", code=error.code, param=name) from None
    return value
