"""The provider's page of the policy: its versions, a form for the next one, and its trial on past jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from functools import lru_cache
from typing import Annotated, Literal, get_args

from fastapi import APIRouter, Query, Request
from sqlalchemy.orm import Session
from starlette.responses import RedirectResponse, Response

from app import quotas
from app.catalog import service as catalog
from app.dashboard.rendering import page
from app.dashboard.viewer import NO_FAULTS, Faults, ProviderDep, SentDep, SubmittedForm, Viewer
from app.deps import LookDep, ProviderBeginDep, QuickStorageDep, ReadDep, SettingsDep
from app.errors import AppError, InvalidRequest, NotFound
from app.http.validation_errors import read
from app.jobs import policy_trial
from app.jobs.policy_trial import PolicyTrial
from app.policies import service
from app.policies.schemas import Policy, PolicyOut, ServingRules
from app.settings import Settings
from spard import config
from spard.config import Agent, AuditSize, FurtherTuning, GateThresholds
from spard.config.checks import RowAction
from spard.data import jsonl
from spard.evaluation.sequential import most_hits

# Convert a policy to a form and back: common settings as fields, ranges and serving as JSON.

ACTIONS: Sequence[str] = get_args(RowAction)
_TICKS = ("allow_unmeasured_judge", "correct_judge_errors")  # thresholds that are no numbers
THRESHOLDS = tuple(each.name for each in fields(GateThresholds) if each.name not in _TICKS)
AGENT = tuple(each.name for each in fields(Agent))
BUDGET = tuple(each.name for each in fields(FurtherTuning))
SIGNALS = ("threshold", "max_dropped", "max_inverted", "read")
# Groups of the form's numbers, by their place in a policy.
_NUMBERS: Mapping[str, Sequence[str]] = {
    "thresholds": THRESHOLDS,
    "row_signal": SIGNALS,
    "further_tuning": BUDGET,
    "agent": AGENT,
}
SIZES_OF_AUDITS: Sequence[str] = get_args(AuditSize)
OLDER, UNTIL = (get_args(ServingRules.model_fields[name].annotation) for name in ("older_audits", "until_asked"))
# Shares of the API that people read and write in percent.
_PERCENT = frozenset(
    {*(f"thresholds.{name}" for name in THRESHOLDS), *(f"row_signal.{name}" for name in SIGNALS if name != "read")}
)
_AS_JSON = ("ranges", "serving")
_FIELDS_OF_SERVING = ("older_audits", "until_asked")  # fields of their own, not part of the JSON


@dataclass(frozen=True, slots=True)
class PolicyForm:
    """The form's values as text; `numbers` are keyed by the API's names, such as `thresholds.max_asr`.

    Numbers that are shares in the API are in percent here.
    """

    defenses: Sequence[str]
    all_models: bool
    models: Sequence[str]
    numbers: Mapping[str, str]
    allow_unmeasured_judge: bool
    correct_judge_errors: bool
    action: str
    audit: str
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
        numbers = _number_texts({place: getattr(policy, place) for place in _NUMBERS})
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
            audit=policy.audit,
            embedder=policy.embedder or "",
            transcripts=policy.transcripts,
            waivers=policy.waivers,
            older_audits=policy.serving.older_audits,
            until_asked=policy.serving.until_asked,
            ranges=json.dumps(content["ranges"], indent=2),
            serving=json.dumps(serving, indent=2),
        )

    @classmethod
    def of_sent(cls, sent: SubmittedForm) -> PolicyForm:
        """Return the form as it was submitted."""
        numbers = [f"{place}.{name}" for place, names in _NUMBERS.items() for name in names]
        return cls(
            defenses=sent.texts("defenses"),
            all_models=bool(sent.text("all_models")),
            models=sent.texts("models"),
            numbers={name: sent.text(name) for name in numbers},
            allow_unmeasured_judge=bool(sent.text("thresholds.allow_unmeasured_judge")),
            correct_judge_errors=bool(sent.text("thresholds.correct_judge_errors")),
            action=sent.text("row_signal.action"),
            audit=sent.text("audit") or Policy().audit,
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
            "audit": self.audit,
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
        found = {name: text for name, text in self.numbers.items() if name.startswith(place) and text}
        return {name.removeprefix(place): _api_number(name, text) for name, text in found.items()}

    def changes(self, default: PolicyForm) -> dict[str, str]:
        """Return each field that differs from the default, with the default as the page shows it."""
        found = {name: default.numbers[name] for name, text in self.numbers.items() if text != default.numbers[name]}
        for each in fields(self):
            if each.name != "numbers" and getattr(self, each.name) != (before := getattr(default, each.name)):
                found[_API_NAMES.get(each.name, each.name)] = before if isinstance(before, str) else ""
        return found


_API_NAMES = {
    **{name: f"thresholds.{name}" for name in _TICKS},
    **{name: f"serving.{name}" for name in _FIELDS_OF_SERVING},
    "action": "row_signal.action",
    "all_models": "models",
}


def _number_texts(groups: Mapping[str, object]) -> dict[str, str]:
    """Return the fields of some groups of `_NUMBERS`, given a policy's object for each; None has no values."""
    return {
        f"{place}.{name}": _field_text(f"{place}.{name}", getattr(values, name, None))
        for place, values in groups.items()
        for name in _NUMBERS[place]
    }


def _field_text(name: str, value: object) -> str:
    """Format a value for a field, a share in percent; "" for None."""
    if name in _PERCENT and isinstance(value, int | float):
        return f"{100 * value:.10g}"
    return "" if value is None else f"{value:g}" if isinstance(value, int | float) else str(value)


def _api_number(name: str, text: str) -> str:
    """Return a field's number in the form of the API; other text is returned unchanged, for the API to refuse."""
    if name not in _PERCENT:
        return text
    try:
        return str(Decimal(text.removesuffix("%").strip()) / 100)
    except ArithmeticError:
        return text


def _faults(error: AppError) -> Faults:
    """Return an error's messages; the bounds of shares are in percent, as their fields are."""
    faults = Faults.from_error(error)
    bounds = ((str(each.get("param")), each.get("bound")) for each in error.details or ())
    told = {name: _bound_text(bound) for name, bound in bounds if name in _PERCENT and isinstance(bound, dict)}
    return Faults({**faults.by_field, **told}, faults.message)


def _bound_text(bound: Mapping[str, float]) -> str:
    ((relation, share),) = bound.items()
    return f"Input should be {_RELATIONS[relation]} {100 * share:.10g} %."


_RELATIONS = {"ge": "greater than or equal to", "gt": "greater than", "le": "less than or equal to", "lt": "less than"}

# Presets multiply the deployment's limits on attacks and refusals.
PRESETS: Mapping[str, float] = {"strict": 0.5, "default": 1.0, "lenient": 2.0}
_LIMITS = ("max_asr", "max_asr_rise", "max_shown_asr_rise", "max_dressed_asr")
_REFUSALS = ("max_over_refusal_rise", "max_dressed_refusal_rise")


def preset_thresholds(name: str, gate: GateThresholds) -> GateThresholds:
    """Return the thresholds of a preset, given those of the deployment.

    A strict one has half of its limits on attacks; harmless refusals keep theirs, as a stricter gate that also asks for
    fewer of them would pass hardly any model. A lenient one has twice both.
    """
    names = _LIMITS if name == "strict" else (*_LIMITS, *_REFUSALS)
    return replace(gate, **{each: min(1.0, PRESETS[name] * getattr(gate, each)) for each in names})


def _json(name: str, text: str) -> object:
    try:
        value: object = jsonl.parse_json(text or "{}")
    except jsonl.BadJson as error:
        raise InvalidRequest(f"{error.message}: {error.hint}.", code=error.code, param=name) from None
    return value


SIZES = (150, 500)  # suite sizes, in prompts, for which the page shows how many hits pass

router = APIRouter(include_in_schema=False, prefix="/provider/policies")


@router.get("")
def policies_page(
    request: Request,
    viewer: ProviderDep,
    session: ReadDep,
    settings: SettingsDep,
    of: Annotated[int | None, Query(alias="from", ge=0, le=2**31)] = None,
    preset: Literal["strict", "default", "lenient"] | None = None,
) -> Response:
    """Show all versions, and the form filled in with one of them, by default the one in force.

    A preset replaces its thresholds.
    """
    versions = service.versions(session, settings)
    based_on = next((each for each in versions if of in (None, each.version)), None)
    if based_on is None:
        raise NotFound(f"There is no version {of} of the policy.", code="policy_not_found", param="from")
    content = based_on.content
    if preset:
        content = _apply_preset(content, preset, settings)
    return _page(request, viewer, session, settings, versions, PolicyForm.from_policy(content))


@router.post("")
async def take_policy(
    request: Request,
    sent: SentDep,
    look: LookDep,
    begin: ProviderBeginDep,
    storage: QuickStorageDep,
    settings: SettingsDep,
) -> Response:
    """Try the form's policy on past jobs, or put it in force."""
    form, viewer = PolicyForm.of_sent(sent), sent.viewer

    def store_policy() -> Response:
        trial, faults, status = None, NO_FAULTS, 200
        try:
            policy = form.policy().with_defaults(settings.gate)
            if sent.text("act") == "put":
                with begin() as session:
                    service.add(session, viewer.principal.key_id, policy)
                return RedirectResponse("/provider/policies", 303)
            trial = policy_trial.try_policy(look, storage, policy, policy_trial.USUAL)
        except AppError as error:
            faults, status = _faults(error), error.status
        with look() as session:
            versions = service.versions(session, settings)
            return _page(request, viewer, session, settings, versions, form, trial, faults, status)

    return await viewer.lanes.reads.project_share(viewer.project_id).run(store_policy)


def _page(
    request: Request,
    viewer: Viewer,
    session: Session,
    settings: Settings,
    versions: Sequence[PolicyOut],
    form: PolicyForm,
    trial: PolicyTrial | None = None,
    faults: Faults = NO_FAULTS,
    status: int = 200,
) -> Response:
    default = versions[-1].content
    presets = {name: _number_texts({"thresholds": preset_thresholds(name, settings.gate)}) for name in PRESETS}
    return page(
        request,
        "provider_policies",
        viewer,
        status=status,
        versions=versions,
        most=_most_hits(versions[0].content.thresholds),
        defenses=list(config.defenses()),
        offered=catalog.base_model_names(session),
        actions=ACTIONS,
        audits=SIZES_OF_AUDITS,
        older=OLDER,
        until=UNTIL,
        form=form,
        changes=form.changes(PolicyForm.from_policy(default)),
        presets=presets,
        trial=trial,
        projects=quotas.project_names(session, [job.project_id for job in trial.data] if trial else []),
        faults=faults,
    )


def _apply_preset(policy: Policy, name: str, settings: Settings) -> Policy:
    return policy.model_copy(update={"thresholds": preset_thresholds(name, settings.gate)})


@lru_cache(maxsize=16)
def _most_hits(limits: GateThresholds) -> Sequence[tuple[int, int | None, int | None]]:
    """Return (suite size, most answered attacks and most refusals with which it passes), for each size in `SIZES`."""
    return [(size, most_hits("harmful", size, limits), most_hits("benign", size, limits)) for size in SIZES]
