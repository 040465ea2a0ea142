"""The API clients of `spard move-in`: for the account at OpenAI, for this service, and for a judge."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import typer

from app.commands.client import api_key, service_url
from app.commands.terminal import CommandFailed
from app.move_in import OPENAI
from app.move_in.api import Api, Source, refusal
from app.move_in.ledger import Ledger, MoveInFailed, without_keys
from app.move_in.read import find_source
from app.move_in.replies import SameJudge
from spard.config.patience import Patience

if TYPE_CHECKING:
    from openai import OpenAI


_TOGETHER = "https://api.together.ai/v1"
_KEYS: Mapping[Source, str] = {
    "openai": "OPENAI_API_KEY",
    "azure": "AZURE_OPENAI_API_KEY",
    "together": "TOGETHER_API_KEY",
}


@dataclass(frozen=True, slots=True)
class Place:
    """The account to read: its base URL, whose API that is (None: found by the host), and Azure's API version."""

    base_url: str
    source: Source | None = None
    api_version: str | None = None


@contextmanager
def account(place: Place, patience_s: float, deployments: Mapping[str, str] | None = None) -> Iterator[Api]:
    """Yield the account's API, with the key from its source's variable.

    `deployments` are the names under which models answer. Raises MoveInFailed if the key or Azure's endpoint is not
    set, and for a refusal after all retries.
    """
    from openai import APIStatusError

    source = place.source or find_source(place.base_url)
    name = _KEYS[source]
    key = os.environ.get(name)
    if not key:
        raise MoveInFailed(f"Set {name} to the account's key; it is sent to the account alone and kept nowhere.")
    with _client(place, source, key) as client:
        try:
            yield Api(client, name, _patience(patience_s), _warn, source=source, deployments=deployments or {})
        except APIStatusError as error:
            raise MoveInFailed(f"The account: {refusal(error)['message']}") from None


def _client(place: Place, source: Source, key: str) -> OpenAI:
    """Return openai's client of an account; raise MoveInFailed if Azure's endpoint is not known."""
    from openai import AzureOpenAI, OpenAI  # takes half a second to import

    url = place.base_url.rstrip("/")
    if source == "together" and url == OPENAI:
        url = _TOGETHER
    if source == "azure":
        url = os.environ.get("AZURE_OPENAI_ENDPOINT", "").rstrip("/") if url == OPENAI else url
        if not url:
            raise MoveInFailed("Name the resource with --base-url https://NAME.openai.azure.com.")
        endpoint = "{0.scheme}://{0.netloc}".format(urlsplit(url))
        if place.api_version:
            return AzureOpenAI(azure_endpoint=endpoint, api_version=place.api_version, api_key=key, max_retries=0)
        # Azure's API without versions has OpenAI's paths; its own header goes beside OpenAI's.
        headers = {"api-key": key}
        return OpenAI(base_url=f"{endpoint}/openai/v1", api_key=key, default_headers=headers, max_retries=0)
    has_path = urlsplit(url).path not in ("", "/")
    return OpenAI(base_url=url if has_path else f"{url}/v1", api_key=key, max_retries=0)


@contextmanager
def service(patience_s: float) -> Iterator[Api]:
    """Yield this service's API, with the key SPARD_API_KEY; raise CommandFailed for a refusal after all retries."""
    from openai import APIStatusError, OpenAI

    try:
        with OpenAI(base_url=service_url(), api_key=api_key(), max_retries=0) as client:
            yield _api(client, "SPARD_API_KEY", patience_s)
    except APIStatusError as error:
        raise CommandFailed(str(refusal(error)["message"])) from None


@contextmanager
def judging(url: str | None, model: str | None, ledger: Ledger, patience_s: float) -> Iterator[Any]:
    """Yield the judge of replies, or None unless both `url` and `model` are given."""
    if url is None or model is None:
        yield None
        return
    from openai import APIStatusError, OpenAI

    key = os.environ.get("SPARD_JUDGE_API_KEY") or "none"
    with OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        try:
            api = _api(client, "SPARD_JUDGE_API_KEY", patience_s)
            yield SameJudge(api, model, ledger)
        except APIStatusError as error:
            raise MoveInFailed(f"The judge: {refusal(error)['message']}") from None


def _api(client: Any, key_name: str, patience_s: float) -> Api:
    return Api(client, key_name, _patience(patience_s), tell=_warn)


def _patience(limit_s: float) -> Patience:
    return Patience(limit_s=limit_s)


def _warn(line: str) -> None:
    typer.echo(without_keys(line), err=True)
