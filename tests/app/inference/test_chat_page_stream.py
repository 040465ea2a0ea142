"""The chat page's replies arrive as they are written, by the code that answers `/v1/chat/completions`."""

# ruff: noqa: F811 - fixtures are asked for by the names that they are imported under

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import httpx2
import pytest

from app.errors import Unavailable
from app.inference.engine_process import Stream
from tests.app.inference.conftest import Lab
from tests.app.inference.test_streams import WAIT_S, Endless, calls, endless, model, wait_until  # noqa: F401 - fixtures

REPLY = "/chat/reply"


@contextmanager
def browse(lab: Lab, model: str, *scopes: str) -> Iterator[tuple[httpx2.Client, dict[str, Any]]]:
    """A signed-in browser, and the form of a question to a model."""
    with httpx2.Client(base_url=lab.url.removesuffix("/v1"), follow_redirects=True, timeout=120) as browser:
        browser.post("/sign-in", data={"key": lab.key("org-customer", *scopes)})
        page = browser.get(
            "/chat"
        ).text  # not the list of jobs: other tests of this lab release some without a whole report
        token = re.findall(r'name="form_token" value="(\w+)"', page)[0]
        yield browser, {"form_token": token, "model": model, "system": "You sell lamps.", "question": "Hello there"}


def events(answer: httpx2.Response) -> Iterator[Any]:
    """The objects of a stream, as they arrive."""
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def read_text(chunks: Iterator[Any]) -> str:
    return "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks)


@pytest.mark.parametrize("side", ["base", "own"])
def test_a_reply_arrives_in_pieces_and_is_that_of_the_api(served_lab: Lab, model: str, side: str) -> None:
    turns = {"asked": ["Hi\r\nyou"], "base_reply": ["base says"], "own_reply": ["own says"]}
    with browse(served_lab, model) as (browser, form):
        with browser.stream("POST", REPLY, data=form | turns | {"side": side}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            chunks = list(events(answer))
        whole = browser.post("/chat", data=form | turns).text
    assert len(chunks) > 3
    name = {"base": "tiny", "own": model}[side]
    messages: Any = [
        {"role": "system", "content": "You sell lamps."},
        {"role": "user", "content": "Hi\nyou"},
        {"role": "assistant", "content": f"{side} says"},
        {"role": "user", "content": "Hello there"},
    ]
    asked = served_lab.client().chat.completions.create(model=name, messages=messages, temperature=0, max_tokens=256)
    assert read_text(iter(chunks)) == asked.choices[0].message.content
    assert 'name="asked" value="Hello there"' in whole  # the form without scripts still answers with a page
    streamed, _, of_api = calls(served_lab, name)[-3:]
    assert (streamed.endpoint, streamed.status) == ("chat.completions", "done")
    assert (streamed.prompt_tokens, streamed.reply_tokens) == (of_api.prompt_tokens, of_api.reply_tokens)


def test_the_engine_stops_with_the_stop_button(served_lab: Lab, endless: Endless, model: str) -> None:
    with browse(served_lab, model) as (browser, form), browser.stream("POST", REPLY, data=form) as answer:
        assert "on " in read_text(islice(events(answer), 5))
    assert endless.stopped.wait(WAIT_S)
    wait_until(lambda: calls(served_lab, model)[-1].status == "client_gone")
    assert calls(served_lab, model)[-1].reply_tokens > 0


class Failing(Endless):
    """An engine that writes two words and then fails."""

    async def _write(self, stream: Stream) -> None:
        for written in (1, 2):
            stream.put({"kind": "piece", "id": 1, "index": 0, "text": "on ", "reply_tokens": written, "finish": None})
            await asyncio.sleep(0.005)
        stream.put(Unavailable("The engine has ended."))


def test_an_error_amid_a_reply_comes_after_its_pieces(
    served_lab: Lab, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_lab.app.state.serving, "engines", Failing())
    with browse(served_lab, model) as (browser, form), browser.stream("POST", REPLY, data=form) as answer:
        *chunks, last = events(answer)
    assert read_text(iter(chunks)) == "on on "
    assert (last["error"]["message"], last["error"]["code"]) == ("The engine has ended.", "unavailable")


def test_a_question_that_cannot_be_asked_is_an_error_without_a_stream(served_lab: Lab, model: str) -> None:
    with browse(served_lab, model) as (browser, form):
        empty = browser.post(REPLY, data=form | {"question": " "})
        baseless = browser.post(REPLY, data=form | {"model": "tiny", "side": "base"})
        unknown = browser.post(REPLY, data=form | {"model": "other"})
    assert (empty.status_code, empty.json()["error"]["message"]) == (400, "Write a question first.")
    assert (baseless.status_code, unknown.status_code) == (404, 404)
    assert unknown.json()["error"]["code"] == "model_not_found"


def test_no_other_site_and_no_reading_key_gets_a_reply(served_lab: Lab, model: str) -> None:
    asked = len(calls(served_lab, model))
    with browse(served_lab, model) as (browser, form):
        for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
            answer = browser.post(REPLY, data=form, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "stale_form")
        assert browser.post(REPLY, data=form | {"form_token": "0" * 64}).status_code == 403
    with browse(served_lab, model, "read") as (browser, form):
        answer = browser.post(REPLY, data=form)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "insufficient_scope")
    assert len(calls(served_lab, model)) == asked
