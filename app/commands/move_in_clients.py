"""The API clients of `spard move-in`: for the account at OpenAI, for this service, and for a judge."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import typer

from app.commands.client import api_key, service_url
from app.commands.terminal import CommandFailed
from app.move_in.api import Api, refusal
from app.move_in.judge import SameJudge
from app.move_in.ledger import Ledger, MoveInFailed, without_keys
from spard.config.patience import Patience


@contextmanager
def account(base_url: str, patience_s: float) -> Iterator[Api]:
    """Yield the account's API, with the key OPENAI_API_KEY; raise MoveInFailed for a refusal after all retries."""
    from openai import APIStatusError, OpenAI  # takes half a second to import

    key = os.environ.get("OPENAI_API_KEY")
    if not key:
        raise MoveInFailed("Set OPENAI_API_KEY to the account's key; it is sent to the account alone and kept nowhere.")
    url = base_url if urlsplit(base_url).path not in ("", "/") else f"{base_url.rstrip('/')}/v1"
    with OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        try:
            yield _api(client, "OPENAI_API_KEY", patience_s)
        except APIStatusError as error:
            raise MoveInFailed(f"The account: {refusal(error)['message']}") from None


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
    return Api(client, key_name, Patience(limit_s=patience_s), tell=_warn)


def _warn(line: str) -> None:
    typer.echo(without_keys(line), err=True)
