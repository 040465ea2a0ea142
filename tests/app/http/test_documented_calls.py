"""Every line of docs/api.md reaches its address and is understood there: the Python client's and curl's.

The page spells out the client's line where the client has a method, and elsewhere an example of what is sent. The other
lines follow four patterns on the page, and are run here too.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient
from openai import OpenAI

from tests.app.http.conftest import Service, pool, rows
from tools.api_page import Call, calls

# Codes that say that a request is not one of this API; any other refusal has understood it.
NOT_UNDERSTOOD = {
    "extra_forbidden",
    "invalid_json",
    "invalid_multipart",
    "invalid_type",
    "invalid_value",
    "method_not_allowed",
    "missing_field",
    "not_allowed",
    "server_error",
    "unknown_url",
    "unsupported_content_type",
}
ENDING = {"DELETE", "cancel", "complete"}  # what ends a thing is called after the rest
Change = Callable[[str], str]


@pytest.fixture
def change(service: Service, provider: TestClient, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Change:
    """Put what is there into a line: a file, a queued job, the server's address, a key."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("train.jsonl").write_bytes(rows(10))
    Path("general-safe.jsonl").write_bytes(pool())
    Path("redteam.jsonl").write_bytes(
        b"".join(json.dumps({"prompt": f"Do harm {i}"}).encode() + b"\n" for i in range(9))
    )
    file = provider.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": ("train.jsonl", rows(10))}).json()
    job = provider.post("/v1/fine_tuning/jobs", json={"model": "lab/tiny-1", "training_file": file["id"]}).json()
    key = provider.headers["authorization"].removeprefix("Bearer ")
    there = {
        "http://127.0.0.1:8000": url.removesuffix("/v1"),
        "$SPARD_BASE_URL": url,
        "$SPARD_API_KEY": key,
        "file-abc123": file["id"],
        "ftjob-abc123": job["id"],
        "my-model": "lab/tiny-1",
        "/org-default": "/org-provider",
    }
    monkeypatch.setenv("OPENAI_API_KEY", key)
    return lambda line: _replace_ids(line, there)


def _replace_ids(line: str, there: Mapping[str, str]) -> str:
    for name, value in there.items():
        line = line.replace(name, value)
    return line


def in_order() -> list[Call]:
    return sorted(calls(), key=lambda call: call.method in ENDING or call.path.rpartition("/")[2] in ENDING)


@pytest.mark.filterwarnings(
    "ignore:unclosed file", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # as people write
def test_lines_for_the_python_client(provider_with_model: TestClient, change: Change, url: str) -> None:
    with OpenAI(base_url=url, max_retries=0) as client:
        answers = {call.name: _error_code(change(call.python()), client) for call in in_order()}
    assert {name: code for name, code in answers.items() if code in NOT_UNDERSTOOD} == {}
    assert [*answers.values()].count("") > len(answers) / 3


def _error_code(line: str, client: OpenAI) -> str:
    """The code of the error that a line ends in, empty for none."""
    try:
        found: Any = eval(line, {"client": client, "Stream": openai.Stream})  # noqa: S307 - lines of our own
        if isinstance(found, openai.Stream):
            found.close()
    except openai.APIStatusError as error:
        return str(error.code)
    return ""


def test_lines_for_curl(provider_with_model: TestClient, change: Change) -> None:
    answers = {}
    for call in in_order():
        line = change(call.curl()).replace("curl", "curl --silent --max-time 60 --write-out '\\n%{http_code}'", 1)
        if call.path.endswith("/stream"):
            line = line.replace("--max-time 60", "--max-time 1")
        done = subprocess.run(["bash", "-c", line], capture_output=True, check=False)
        body, _, status = done.stdout.decode(errors="replace").rpartition("\n")
        answers[call.name] = "" if status < "400" else str(json.loads(body)["error"]["code"])
    assert {name: code for name, code in answers.items() if code in NOT_UNDERSTOOD} == {}
    assert [*answers.values()].count("") > len(answers) / 3


def test_the_page_has_these_lines() -> None:
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    blocks = set(re.findall(r"^```(?:python|bash)\n(.*?)\n```$", page, re.MULTILINE | re.DOTALL))
    found = {call.name: call for call in calls()}
    assert {call.python() for call in found.values() if call.has_method()} <= blocks
    patterns = [found[name].curl() for name in ("POST /v1/webhook_endpoints", "POST /v1/admin/pools")]
    validation = found["GET /v1/files/{file_id}/validation"]
    assert {validation.python(), validation.curl(), *patterns} <= blocks
    examples = set(re.findall(r"^Example: `(.*)`$", page, re.MULTILINE))
    repeated = {"POST /v1/fine_tuning/jobs/estimate", "POST /v1/admin/policies/dry_run"}  # the body of another call
    sending = [call for call in found.values() if call.has_body() and not call.has_method()]
    assert {call.example() for call in sending if call.name not in repeated} == examples
    assert len(examples) > 10
    assert all(f"\n### {name}\n" in page for name in found)


def test_each_field_of_a_body_is_on_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    section = page.partition("### POST /v1/fine_tuning/jobs\n")[2].partition("\n### ")[0]
    fields = [
        "`model` (required)",
        "`safety.selection.ratio` (default `0.03`)",
        '`ending.keep` (`"last"`, `"best"`; default `"last"`)',
        '`method.type` (`"supervised"`, `"dpo"`, `"reinforcement"`; required)',
        "`held_out_rows`",
    ]
    assert [field for field in fields if f"- {field}\n" not in section] == []
