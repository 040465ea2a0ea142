"""A client that leaves a stream is no failure of the service, whatever FastAPI makes of it."""

from __future__ import annotations

import asyncio
import logging

import pytest
from anyio import BrokenResourceError
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from app.http.middleware import Envelope
from app.ops.metrics import RequestMetrics

FAILED, LEFT = "the request failed", "the client went away"


@pytest.mark.parametrize(
    ("errors", "logged"), [([BrokenResourceError()], LEFT), ([BrokenResourceError(), ValueError("a fault")], FAILED)]
)
def test_a_stream_that_is_left_while_an_event_waits_is_not_logged_as_a_failure(
    errors: list[Exception], logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ExceptionGroup("unhandled errors in a TaskGroup", errors)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    app = FastAPI()
    app.state.requests = RequestMetrics()
    scope = {"type": "http", "method": "GET", "path": "/v1/x", "headers": [], "app": app}
    with caplog.at_level(logging.INFO):
        asyncio.run(Envelope(stream)(scope, receive, send))
    assert {FAILED, LEFT} & set(caplog.messages) == {logged}
