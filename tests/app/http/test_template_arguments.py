"""Arguments of a chat template are fixed when a base model is offered, and are in all that its jobs render."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app import db
from app.db.tables import Job
from tests.app.http.conftest import JOBS, Service
from tests.app.http.provider.conftest import fault, send, sign_in_admin
from tests.spard.parts import byte_tokenizer, write_model

FILES, MODELS = "/v1/files", "/v1/admin/models"
EFFORT = (
    "<|system|>effort {{ effort | default('medium') }}\n{% for m in messages %}<|{{ m['role'] }}|>\n"
    "{{ m['content'] }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
HIGH = {"effort": "high"}


@pytest.fixture
def folder(job_body: dict[str, Any], tmp_path: Path) -> Path:
    """The folder of the model on offer, with a template that reads an effort."""
    own = byte_tokenizer()
    own.chat_template = EFFORT
    own.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def offer(provider: TestClient, folder: Path, alias: str, **more: Any) -> Any:
    return provider.post(MODELS, json={"alias": alias, "source": str(folder)} | more)


def first_line(customer: TestClient, file: str, model: str) -> str:
    """What the preview renders before the first turn."""
    got = customer.get(f"{FILES}/{file}/preview", params={"model": model, "n": 1}).json()
    return "".join(token["text"] for token in got["data"][0]["tokens"]).partition("\n")[0]


def test_the_same_folder_with_other_arguments_is_another_base_model(
    provider: TestClient, customer: TestClient, job_body: dict[str, Any], folder: Path
) -> None:
    for alias, more in (("plain", {}), ("high", {"template_arguments": HIGH})):
        got = offer(provider, folder, alias, **more)
        assert (got.status_code, got.json()["template_arguments"]) == (200, more.get("template_arguments"))
    listed = {each["alias"]: each["template_arguments"] for each in provider.get(MODELS).json()["data"]}
    assert listed == {"high": HIGH, "lab/tiny-1": None, "plain": None}
    for alias, effort in (("plain", "medium"), ("high", "high"), ("plain", "medium")):
        assert first_line(customer, job_body["training_file"], alias) == f"<|system|>effort {effort}"

    jobs = [customer.post(JOBS, json=job_body | {"model": alias}).json()["id"] for alias in ("plain", "high")]
    with db.read(provider.app.state.engine) as session:  # type: ignore[attr-defined]  # Starlette says less of it
        plain, high = (session.get_one(Job, job).spec.model.rendering or {} for job in jobs)
    assert (plain["arguments"], high["arguments"]) == ({}, HIGH)
    assert plain["template"] == high["template"]
    card = provider.get(f"{MODELS}/high/fitness").json()
    assert card["fault"] is None
    assert any("rendered with effort='high'" in line for line in card["template"]["lines"])


def test_offered_anew_without_them_it_renders_as_the_template_does_and_jobs_keep_theirs(
    provider: TestClient, customer: TestClient, job_body: dict[str, Any], folder: Path
) -> None:
    offer(provider, folder, "tiny", template_arguments=HIGH)
    job = customer.post(JOBS, json=job_body | {"model": "tiny"}).json()["id"]
    assert offer(provider, folder, "tiny").json()["template_arguments"] is None
    assert first_line(customer, job_body["training_file"], "tiny") == "<|system|>effort medium"
    with db.read(provider.app.state.engine) as session:  # type: ignore[attr-defined]  # Starlette says less of it
        kept = session.get_one(Job, job).spec.model.rendering or {}
    assert kept["arguments"] == HIGH


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"efort": "high"}, "the chat template does not read efort; it reads effort."),
        ({"messages": ["x"]}, "messages cannot be fixed"),
        ({"effort": float("nan")}, "finite"),
        ({"effort": "x" * 4096}, "at most 4096"),
        ({"effort": None}, ""),
        ({"effort": {"a": "b"}}, ""),
        (["effort"], ""),
    ],
)
def test_what_cannot_be_fixed_is_refused_at_its_field(
    arguments: Any, told: str, provider: TestClient, folder: Path
) -> None:
    body = json.dumps({"alias": "tiny", "source": str(folder), "template_arguments": arguments})
    got = provider.post(MODELS, content=body, headers={"content-type": "application/json"})
    error = got.json()["error"]
    assert got.status_code == 400
    assert error["param"].startswith("template_arguments")
    assert told in error["message"]
    assert [each["alias"] for each in provider.get(MODELS).json()["data"]] == ["lab/tiny-1"]


def test_without_a_tokenizer_on_this_machine_they_cannot_be_checked(
    provider: TestClient, provider_with_model: TestClient, tmp_path: Path
) -> None:
    got = offer(provider, tmp_path / "model", "tiny", template_arguments=HIGH)
    error = got.json()["error"]
    assert (got.status_code, error["param"]) == (400, "template_arguments")
    assert "not on the machine that serves the API" in error["message"]


def test_the_page_has_a_field_for_them(service: Service, provider: TestClient, folder: Path) -> None:
    browser = sign_in_admin(service)
    fields = {"alias": "high", "source": str(folder)}
    page = send(browser, "/provider/models", fields | {"template_arguments": json.dumps(HIGH)})
    assert '{"effort": "high"}' in html.unescape(page.text)
    assert {"alias": "high", "template_arguments": HIGH}.items() <= provider.get(MODELS).json()["data"][0].items()
    for wrong in ('{"efort": "high"}', "high"):
        page = send(browser, "/provider/models", fields | {"template_arguments": wrong})
        assert page.status_code == 400
        assert fault(page, "template_arguments")
    browser.close()


def test_the_command_tries_and_offers_a_model_with_them(
    run: Any, provider: TestClient, provider_with_model: TestClient, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "tiny")
    (model / "chat_template.jinja").write_text(EFFORT)
    code, printed = run("models", "add", "tiny", str(model), "--template-arguments", json.dumps(HIGH))
    assert code == 0, printed
    assert "Chat template: rendered with effort='high'" in printed
    assert provider.get(MODELS).json()["data"][1]["template_arguments"] == HIGH
    code, printed = run("models", "add", "other", str(model), "--template-arguments", '{"efort": 1}')
    assert (code, "The model is not offered: template_arguments: the chat template does not" in printed) == (1, True)
    code, printed = run("models", "add", "other", str(model), "--no-try", "--template-arguments", "high")
    assert (code, "give one JSON object" in printed) == (1, True)
