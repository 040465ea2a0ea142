"""Check the settings of the configured judge, without asking it."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from app.errors import Unfit
from spard.config import JudgeSpec

_MIN_MEMBERS = 2

AT_OPENAI = (
    "The judge is asked at api.openai.com, since no base_url is set: rows of customers and replies of their models are "
    "sent there. Set SPARD_JUDGE_BASE_URL (of a member, base_url) to https://api.openai.com/v1 if that is meant."
)

KeyOf = Callable[[JudgeSpec], str | None]  # returns the API key of a judge's endpoint, if one is set


def check_judge(judge: JudgeSpec, key_of: KeyOf) -> None:
    """Raise `Unfit` for the first missing or wrong setting of a judge."""
    _check(judge, key_of, lambda field: "SPARD_JUDGE" if field == "name" else f"SPARD_JUDGE_{field.upper()}")


def is_at_openai(judge: JudgeSpec) -> bool:
    """Return True if the judge, or a member of it, uses OpenAI's endpoint only because no base_url is set."""
    return any(each.name == "llm" and each.base_url is None for each in judge.with_members())


def _check(judge: JudgeSpec, key_of: KeyOf, setting: Callable[[str], str]) -> None:
    """Check a judge and its members; `setting` returns the name of the setting for a field."""
    match judge.name:
        case "llm":
            _check_endpoint(judge, key_of, setting)
        case "classifier" if judge.model == JudgeSpec().model:
            needed = f"set {setting('model')} to the folder or the hub id of its weights"
            raise Unfit(f"{setting('name')} is 'classifier', but no classifier is named: {needed}.")
        case "consensus" if len(judge.members) < _MIN_MEMBERS:
            needed = f"set {setting('members')} to a JSON list of at least {_MIN_MEMBERS}"
            raise Unfit(f"{setting('name')} is 'consensus' of {len(judge.members)} judges: {needed}.")
        case "consensus":
            for i, member in enumerate(judge.members):
                _check(member, key_of, _member_setting(f"{setting('members')}[{i}]"))
        case _:
            pass


def _member_setting(member: str) -> Callable[[str], str]:
    return lambda field: f"{member}.{field}"


def _check_endpoint(judge: JudgeSpec, key_of: KeyOf, setting: Callable[[str], str]) -> None:
    if judge.base_url is None:
        if key_of(judge) is None:
            needed = f"set {judge.api_key_env}, or {setting('base_url')} for another server"
            raise Unfit(f"{setting('name')} is 'llm', but OpenAI's endpoint needs a key: {needed}.")
        return
    url = urlsplit(judge.base_url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise Unfit(f"{setting('base_url')} is no URL of an endpoint, such as https://host/v1.")
    if url.username or url.password:
        raise Unfit(f"{setting('base_url')} holds a password, which jobs would keep: set {judge.api_key_env} instead.")
