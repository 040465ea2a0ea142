"""The chat page: a conversation of several turns under a system prompt, which the form carries."""

# ruff: noqa: F811 - fixtures are asked for by the names that they are imported under

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.dashboard.pages import chat as chat_page
from app.files.schemas import FileOut
from tests.app.http.conftest import JOBS, Service, Upload, chat, jsonl
from tests.app.http.test_dashboard import SignIn, sign_in, token  # noqa: F401 - a fixture
from tests.app.http.test_results import MODEL, publish

SYSTEM = "You sell lamps."


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[dict[str, str]]]]:
    """What each model was asked; each answers in two lines with its side and the number of messages."""
    seen: list[tuple[str, list[dict[str, str]]]] = []

    async def answer(_: Any, viewer: Any, reply: Any, conversation: Any, question: str) -> None:
        said = list(conversation.messages(reply.side, question))
        seen.append((reply.side, said))
        reply.text = f"{reply.side}\n{len(said)}"

    monkeypatch.setattr(chat_page, "_ask", answer)
    return seen


@pytest.fixture
def tuned_model(service: Service, customer: TestClient, provider_with_model: TestClient, upload: Upload) -> FileOut:
    """The file of a released model, whose rows share a system prompt."""
    system = {"role": "system", "content": SYSTEM}
    file = upload(jsonl(*({"messages": [system, *chat(f"{i}?")["messages"]]} for i in range(12)))).json()
    customer.post(JOBS, json={"model": "lab/tiny-1", "training_file": file["id"]})
    publish(service, "pass")
    return FileOut.model_validate(file)


def hidden_fields(page: str) -> dict[str, list[str]]:
    """The turns that a page's form carries."""
    found: dict[str, list[str]] = {}
    turns, _, _ = page.partition("<template>")  # from which scripts make the next turn
    for name, value in re.findall(r'<input type="hidden" name="(asked|\w+_reply)" value="([^"]*)">', turns):
        found.setdefault(name, []).append(unescape(value))
    return found


def test_a_conversation_has_turns_and_a_system_prompt(
    sign_in: SignIn, tuned_model: FileOut, messages: list[tuple[str, list[dict[str, str]]]]
) -> None:
    browser = sign_in()
    page = browser.get("/chat", params={"model": MODEL})
    assert f">{SYSTEM}</textarea>" in page.text
    assert "taken from the training rows" in page.text
    form: dict[str, Any] = {"form_token": token(page), "model": MODEL, "system": SYSTEM}
    first = browser.post("/chat", data=form | {"question": "Hello?"}).text
    turns = hidden_fields(first)
    assert turns == {"asked": ["Hello?"], "base_reply": ["base\n2"], "own_reply": ["own\n2"]}
    # A browser sends line ends as CR and LF.
    sent = {name: [value.replace("\n", "\r\n") for value in values] for name, values in turns.items()}
    second = browser.post("/chat", data=form | sent | {"question": "And then?"}).text
    assert hidden_fields(second)["own_reply"] == ["own\n2", "own\n4"]
    side, said = messages[-1]
    assert [each["role"] for each in said] == ["system", "user", "assistant", "user"]
    assert (side, said[0]["content"], said[2]["content"], said[3]["content"]) == ("own", SYSTEM, "own\n2", "And then?")


def test_a_conversation_ends_somewhere(
    sign_in: SignIn, tuned_model: FileOut, messages: list[tuple[str, list[dict[str, str]]]]
) -> None:
    browser = sign_in()
    form: dict[str, Any] = {"form_token": token(browser.get("/chat")), "model": MODEL, "question": "Hello?"}
    turns = {name: ["a"] * 12 for name in ("asked", "base_reply", "own_reply")}
    page = browser.post("/chat", data=form | turns)
    assert (page.status_code, messages) == (400, [])
    assert "A conversation has up to 12 turns here." in page.text
    long = browser.post("/chat", data=form | {"system": "a" * 16_001})
    assert 'id="system-fault"' in long.text


def test_rows_without_one_system_prompt_fill_nothing_in(
    sign_in: SignIn, service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    customer.post(JOBS, json=job_body)
    publish(service, "pass")
    page = sign_in().get("/chat", params={"model": MODEL}).text
    assert "taken from the training rows" not in page
