"""The chat in a browser: replies grow while they are written, can be stopped, and keep what came before an error."""

# ruff: noqa: F811 - fixtures are asked for by the names that they are imported under

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from threading import Event
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from app.errors import Unavailable
from app.files.schemas import FileOut
from app.inference.engine_process import Stream
from app.inference.protocol import Ask, Proof
from app.inference.released import ReleasedModel
from tests.app.http.conftest import Service
from tests.app.http.test_chat_page import SYSTEM, tuned_model  # noqa: F401 - a fixture
from tests.app.http.test_results import MODEL
from tests.browser.test_dashboard import serious, sign_in


class Writer:
    """An engine that writes a word every 20 ms, and the last one, or an error, when the test says so."""

    def __init__(self) -> None:
        self.may_end, self.fails = Event(), False
        self.stopped = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, model: ReleasedModel, project: str, ask: Ask) -> tuple[Stream, int, Proof | None]:
        stream = Stream(1, self._stop)
        side = "own" if model.archive else "base"
        messages: Any = ask["messages"]
        self._tasks.add(asyncio.create_task(self._write(stream, f"{side} answers {messages[-1]['content']}")))
        return stream, 3, None

    def _stop(self, number: int) -> None:
        self.stopped += 1

    async def _write(self, stream: Stream, text: str) -> None:
        written = 0

        def put(word: str, finish: str | None = None) -> None:
            nonlocal written
            written += 1
            said: Any = {"kind": "piece", "index": 0, "text": word, "reply_tokens": written, "finish": finish}
            stream.put(said)

        put(f"{text}:")
        while not self.may_end.is_set() and not self.stopped:
            put(" on")
            await asyncio.sleep(0.02)
        if self.fails:
            stream.put(Unavailable("The engine has ended."))
            return
        put(" end", "stop")
        stream.put({"kind": "done", "reply_tokens": written})


@pytest.fixture
def writer(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    engine = Writer()
    monkeypatch.setattr(service.app.state.serving.engines, "start", engine.start)
    yield engine
    engine.may_end.set()


def open_chat(page: Page, service: Service) -> None:
    sign_in(page, service)
    page.goto(f"/chat?model={MODEL}")
    expect(page.get_by_label("System prompt")).to_have_value(SYSTEM)


def ask(page: Page, question: str) -> None:
    page.get_by_role("textbox", name="uestion").fill(question)
    page.get_by_role("button", name="Ask").click()


def own_reply(page: Page) -> str:
    return page.locator(".turns > li:last-child .tuned .reply").inner_text()


def test_replies_grow_and_become_turns(page: Page, service: Service, tuned_model: FileOut, writer: Writer) -> None:
    open_chat(page, service)
    spoken = page.locator("form.chat [role=status]")
    ask(page, "Where is it?")
    expect(page.locator(".tuned .reply").last).to_contain_text("own answers Where is it?: on")
    before = own_reply(page)
    expect(page.locator(".tuned .reply").last).to_contain_text(before + " on on")
    expect(page.get_by_role("button", name="Ask")).to_be_disabled()
    expect(page.get_by_role("button", name="Stop")).to_be_focused()
    expect(page.get_by_text("Both models are writing")).to_be_visible()
    expect(spoken).to_be_empty()  # not word by word
    assert serious(page) == []
    writer.may_end.set()
    expect(spoken).to_contain_text("Base model: base answers Where is it?")
    expect(spoken).to_contain_text("This model: own answers Where is it?")
    expect(page.get_by_label("Next question")).to_be_focused()
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    assert serious(page) == []
    ask(page, "And then?")
    expect(page.get_by_text("base answers And then?: end", exact=True)).to_be_visible()
    expect(page.locator(".turns > li")).to_have_count(2)
    asked = page.locator("form.chat input[type=hidden][name=asked]")
    # The turn gets its fields when both replies have ended, of which the line above has seen one.
    expect(asked.last).to_have_value("And then?")
    assert [each.input_value() for each in asked.all()] == ["Where is it?", "And then?"]
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_reply_is_stopped_and_stays(page: Page, service: Service, tuned_model: FileOut, writer: Writer) -> None:
    open_chat(page, service)
    ask(page, "Where is it?")
    expect(page.locator(".tuned .reply").last).to_contain_text("on on on")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("Stopped.", exact=True)).to_have_count(2)
    expect(page.get_by_label("Next question")).to_be_empty()
    expect(page.get_by_role("button", name="Ask")).to_be_enabled()
    assert own_reply(page).startswith("own answers Where is it?: on on on")
    assert page.locator("form.chat input[name=own_reply]").input_value() == own_reply(page)
    end = time.monotonic() + 10
    while writer.stopped < 2:  # the engine writes no further
        assert time.monotonic() < end
        page.wait_for_timeout(50)
    assert serious(page) == []


def test_an_error_is_shown_below_what_has_arrived(
    page: Page, service: Service, tuned_model: FileOut, writer: Writer
) -> None:
    writer.fails = True
    open_chat(page, service)
    ask(page, "Where is it?")
    expect(page.locator(".tuned .reply").last).to_contain_text("on on on")
    writer.may_end.set()
    expect(page.locator(".tuned .note.bad")).to_have_text("The engine has ended.")
    assert own_reply(page).startswith("own answers Where is it?: on on on")
    expect(page.get_by_label("Question")).to_have_value("Where is it?")
    assert page.locator("form.chat input[name=asked]").count() == 0  # no turn of the conversation
    assert serious(page) == []
    writer.fails = False
    page.get_by_role("button", name="Ask").click()
    expect(page.get_by_text("own answers Where is it?: end", exact=True)).to_be_visible()
    expect(page.locator(".turns > li")).to_have_count(1)


def test_the_chat_works_without_scripts(page: Page, service: Service, tuned_model: FileOut, writer: Writer) -> None:
    writer.may_end.set()
    sign_in(page, service)
    browser, state = page.context.browser, page.context.storage_state()
    assert browser is not None
    plain = browser.new_context(java_script_enabled=False, storage_state=state, base_url=page.url)
    try:
        without = plain.new_page()
        without.goto(f"/chat?model={MODEL}")
        without.get_by_label("Question").fill("Where is it?")
        without.get_by_role("button", name="Ask").click()
        expect(without.get_by_text("own answers Where is it?: end")).to_be_visible()
        expect(without.get_by_role("button", name="Stop")).to_be_hidden()
    finally:
        plain.close()
