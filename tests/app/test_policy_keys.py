"""Keys of the deployment go to the addresses that the settings list, whatever a policy or a redirect says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from openai import APIStatusError
from pydantic import SecretStr

from app.errors import Unavailable, Unfit
from app.inference.clients import Clients
from app.inference.guard import open_guard
from app.ops.preflight import check_policy_keys
from app.policies.schemas import GuardRule
from app.settings import PolicyEndpoint, Settings, is_listed, read_settings
from spard.config import Agent, JudgeSpec
from spard.errors import JudgeUnavailable
from spard.evaluation.judges import endpoint
from worker import fitness

LISTED = "https://guard.example/v1"


class Listener:
    """A server that keeps the path and the key of each request, and redirects all of them."""

    def __init__(self, redirects_to: str | None = None) -> None:
        self.requests: list[tuple[str, str | None]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:  # noqa: N805 - the listener is `self` here
                handler.rfile.read(int(handler.headers.get("content-length") or 0))
                self.requests.append((handler.path, handler.headers.get("authorization")))
                handler.send_response(307 if redirects_to else 200)
                if redirects_to:
                    handler.send_header("location", redirects_to + handler.path)
                handler.send_header("content-type", "application/json")
                handler.send_header("content-length", "2")
                handler.end_headers()
                handler.wfile.write(b"{}")

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def other() -> Iterator[Listener]:
    """A server that nothing names."""
    listener = Listener()
    yield listener
    listener.close()


@pytest.fixture
def named_server(other: Listener) -> Iterator[Listener]:
    """A server that a policy names, and that redirects to another one."""
    listener = Listener(other.url)
    yield listener
    listener.close()


@pytest.mark.parametrize(
    ("url", "is_same"),
    [
        (LISTED, True),
        (LISTED + "/", True),
        ("https://GUARD.example:443/v1", True),
        ("http://guard.example/v1", False),
        ("https://guard.example/v2", False),
        ("https://guard.example:8443/v1", False),
        ("https://guard.example.evil/v1", False),
        ("https://guard.example@evil/v1", False),
        ("https://guard.example/v1?to=evil", False),
        ("https://guard.example/v1#evil", False),
        ("https://guard.example:port/v1", False),
        ("", False),
    ],
)
def test_an_address_is_the_listed_one_or_it_is_not(url: str, is_same: bool) -> None:
    assert is_listed(url, [LISTED]) is is_same


@pytest.mark.parametrize("kind", ["agent", "guard", "unattested"])
def test_a_key_is_for_the_addresses_beside_it_alone(kind: PolicyEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"SPARD_{kind.upper()}_API_KEY", "secret-1")
    settings = read_settings()
    assert settings.policy_key(kind, LISTED) is None
    with pytest.raises(Unfit, match=f"SPARD_{kind.upper()}_API_KEY is set, but SPARD_{kind.upper()}_URLS is not"):
        check_policy_keys(settings)
    monkeypatch.setenv(f"SPARD_{kind.upper()}_URLS", f"https://first.example/v1, {LISTED}")
    settings = read_settings()
    check_policy_keys(settings)
    assert settings.policy_key(kind, LISTED) == "secret-1"
    assert settings.policy_key(kind, "https://evil.example/v1") is None


def test_an_agent_elsewhere_is_asked_without_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARD_AGENT_API_KEY", "secret-1")
    monkeypatch.setenv("SPARD_AGENT_URLS", LISTED)
    settings = read_settings()
    assert settings.judge_key(Agent(LISTED, "m").endpoint) == "secret-1"
    assert settings.judge_key(Agent("https://evil.example/v1", "m").endpoint) is None


def test_a_guard_elsewhere_gets_no_key_and_its_redirect_no_text(named_server: Listener, other: Listener) -> None:
    async def ask(settings: Settings) -> None:
        clients = Clients()
        guard = open_guard(GuardRule(base_url=f"{named_server.url}/v1"), settings, clients)
        assert guard is not None
        try:
            with pytest.raises(Unavailable):
                await guard.moderate({"input": "a customer's text"})
        finally:
            await clients.close()

    key = SecretStr("guard-secret-1")
    asyncio.run(ask(Settings(guard_api_key=key, guard_urls=(LISTED,))))
    asyncio.run(ask(Settings(guard_api_key=key, guard_urls=(f"{named_server.url}/v1/",))))
    assert [sent for _, sent in named_server.requests] == ["Bearer none", "Bearer guard-secret-1"]
    assert other.requests == []


def test_no_client_of_servers_follows_a_redirect(named_server: Listener, other: Listener) -> None:
    async def ask() -> None:
        clients = Clients()
        async with clients.open_client(f"{named_server.url}/v1", "key") as client:
            with pytest.raises(APIStatusError):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "text"}])
        await clients.close()

    asyncio.run(ask())
    assert (len(named_server.requests), other.requests) == (1, [])


def test_no_judge_is_asked_behind_a_redirect(named_server: Listener, other: Listener) -> None:
    judge = JudgeSpec(name="llm", base_url=f"{named_server.url}/v1", model="m", retries=0)
    with pytest.raises(JudgeUnavailable) as raised:
        endpoint.open_chat(judge, "key").complete("system", "a customer's row")
    assert not raised.value.is_passing  # no waiting helps
    fitness.judge_answers(judge, "key")
    assert (len(named_server.requests), other.requests) == (2, [])
