"""The chat in a browser: a sign of work while the models write, then the next turn."""

# ruff: noqa: F811 - fixtures are asked for by the names that they are imported under

from __future__ import annotations

from threading import Event
from typing import Any

import anyio
import pytest
from playwright.sync_api import Page, expect

from app.dashboard.pages import chat
from app.files.schemas import FileOut
from tests.app.http.conftest import Service
from tests.app.http.test_chat_page import SYSTEM, tuned_model  # noqa: F401 - a fixture
from tests.app.http.test_results import MODEL
from tests.browser.test_dashboard import serious, sign_in

# Playwright waits for a page that is being loaded, so what the page shows meanwhile is written down by the page itself.
REMEMBER = """() => new MutationObserver(() => {
  const shown = document.querySelector("[data-working]").textContent;
  const button = document.querySelector("form.chat button.primary");
  if (!sessionStorage.getItem("seen")) sessionStorage.setItem("seen", `${shown}; disabled: ${button.disabled}`);
}).observe(document.querySelector("[data-working]"), {childList: true})"""


def test_a_conversation_shows_that_the_models_write(
    page: Page, service: Service, tuned_model: FileOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer = Event()

    async def answer(_: Any, viewer: Any, reply: Any, conversation: Any, question: str) -> None:
        while not may_answer.is_set():
            await anyio.sleep(0.02)
        reply.text = f"{reply.side} answers {question}"

    monkeypatch.setattr(chat, "_ask", answer)
    sign_in(page, service)
    page.goto(f"/chat?model={MODEL}")
    expect(page.get_by_label("System prompt")).to_have_value(SYSTEM)
    page.get_by_label("Question").fill("Where is it?")
    page.evaluate(REMEMBER)
    page.get_by_role("button", name="Ask").click(no_wait_after=True)
    may_answer.set()
    expect(page.get_by_text("own answers Where is it?")).to_be_visible()
    assert page.evaluate("sessionStorage.getItem('seen')") == "Both models are writing, 0 s; disabled: true"
    expect(page.get_by_label("Next question")).to_be_focused()
    assert serious(page) == []
    page.get_by_label("Next question").fill("And then?")
    page.get_by_role("button", name="Ask").click()
    expect(page.get_by_text("base answers And then?")).to_be_visible()
    expect(page.get_by_text("base answers Where is it?")).to_be_visible()
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
