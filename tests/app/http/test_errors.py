"""Every answer carries an id, and every error OpenAI's envelope."""

from __future__ import annotations

import gzip
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

import app
from app.catalog.schemas import MODEL_NAME
from app.http import validation_errors
from app.main import create_app
from app.settings import Settings
from spard.models.targets import MODULE
from tests.app.http.conftest import FILES, JOBS, Service


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("PUT", FILES, 405),
        ("TRACE", JOBS, 405),
        ("POST", f"{JOBS}/ftjob-0/pause", 404),
        ("GET", f"{FILES}/%00", 404),
        ("GET", f"{FILES}/..%2f..%2fetc", 404),
        ("GET", f"{FILES}/' OR 1=1", 404),
        ("GET", f"{FILES}/{'a' * 3000}", 404),
        ("GET", f"{FILES}?limit=0", 400),
        ("GET", f"{FILES}?purpose=%00", 400),
        ("POST", f"{JOBS}/ftjob-0/cancel", 404),
    ],
)
def test_errors_are_enveloped(method: str, path: str, status: int, customer: TestClient) -> None:
    got = customer.request(method, path)
    body = got.json()
    assert got.status_code == body["status"] == status
    assert body["error"].keys() >= {"message", "type", "param", "code"}
    assert body["detail"] == body["error"]["message"]
    assert body["instance"] == got.headers["x-request-id"]


def test_what_a_pattern_allows_is_said_in_words(provider: TestClient) -> None:
    sent = {"project_id": "org-provider", "name": "M\u00fcller"}
    error = provider.post("/v1/admin/keys", json=sent).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "name")
    assert error["message"].startswith("name: Allowed: letters without accents, digits, spaces")
    error = provider.get(FILES, params={"purpose": "A"}).json()["error"]
    assert error["message"] == "purpose: Allowed: lower-case letters, '_' and '-', 1 to 64 of them."


def test_every_pattern_has_its_words() -> None:
    files = list(Path(app.__file__).parent.rglob("*.py"))
    used = {found for path in files for found in re.findall(r'pattern=r"([^"]+)"', path.read_text(encoding="utf-8"))}
    assert used | {MODEL_NAME, MODULE} == set(validation_errors.ALLOWED)


def test_good_answers_carry_an_id_of_their_own(customer: TestClient) -> None:
    ids = {customer.get(FILES).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2


def test_problem_json_is_given_to_those_who_ask(customer: TestClient) -> None:
    got = customer.get(f"{FILES}/file-0", headers={"accept": "application/problem+json"})
    assert got.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer sk-spard-wrong", "Basic abc", "Bearer é"])
def test_without_a_good_key_nothing_is_read(header: str | None, service: Service) -> None:
    headers = {b"authorization": header.encode("latin-1")} if header is not None else {}
    got = service.http.get(FILES, headers=headers)
    assert (got.status_code, got.json()["error"]["code"]) == (401, "invalid_api_key")
    assert got.headers["www-authenticate"] == "Bearer"


def test_a_body_that_is_no_json_is_400(customer: TestClient) -> None:
    for body in ("{", '"text"', "[]", "[" * 100_000):
        got = customer.post(JOBS, content=body, headers={"content-type": "application/json"})
        assert (got.status_code, "message" in got.json()["error"]) == (400, True)


def test_a_body_of_another_kind_is_400(customer: TestClient) -> None:
    assert customer.post(JOBS, content=b"<a/>", headers={"content-type": "text/xml"}).status_code == 400


@pytest.mark.parametrize("sent", [{"content": b'{"model": "a"}'}, {"content": b""}, {"json": []}])
def test_a_body_that_is_no_object_is_told_how_to_be_one(customer: TestClient, sent: dict[str, Any]) -> None:
    error = customer.post(JOBS, **sent).json()["error"]
    assert error["message"] == "Send a JSON object with Content-Type: application/json."


CHAT = {"model": "lab/tiny-1", "messages": [{"role": "user", "content": "a"}]}
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("chat/completions", CHAT | {"messages": IMAGE}, "messages.0.content.0.type", "'text'"),
        ("chat/completions", CHAT | {"logit_bias": {"1": 1}}, "logit_bias", "logit_bias: it is not supported here."),
        ("chat/completions", CHAT | {"store": True}, "store", "store: the provider decides"),
        (
            "responses",
            {"model": "lab/tiny-1", "input": "a", "store": True},
            "store",
            "store: the provider decides what is stored here",
        ),
        (
            "fine_tuning/jobs",
            {"metadata": {str(i): "" for i in range(17)}},
            "metadata",
            "At most 16 items are allowed.",
        ),
        ("fine_tuning/jobs", {"safety": "spard"}, "safety", "Input should be an object."),
    ],
)
def test_what_is_wrong_is_told_of_the_field_in_plain_words(
    customer: TestClient, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    error = customer.post(f"/v1/{path}", json=body).json()["error"]
    told = error if error["param"] == param else next(each for each in error["details"] if each["param"] == param)
    assert words in told["message"]
    if path != "fine_tuning/jobs":
        assert error["param"] == param


def test_a_body_over_a_megabyte_is_413(customer: TestClient) -> None:
    got = customer.post(JOBS, content=b" " * 1_100_000, headers={"content-type": "multipart/form-data; boundary=b"})
    assert (got.status_code, got.json()["error"]["code"]) == (413, "file_too_large")


def test_an_error_of_ours_tells_nothing_but_an_id(service: Service, customer: TestClient) -> None:
    engine, service.app.state.engine = service.app.state.engine, None
    got = customer.get(FILES)
    service.app.state.engine = engine
    assert (got.status_code, got.json()["error"]["type"]) == (500, "server_error")
    assert got.headers["x-request-id"] in got.json()["error"]["message"]
    assert "NoneType" not in got.text


def test_a_database_that_is_away_is_503(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = SecretStr("postgresql+psycopg://nobody@127.0.0.1:1/none")
    http = TestClient(create_app(Settings(data_dir=tmp_path, database_url=url)))
    got = http.get(FILES, headers={"authorization": "Bearer sk-spard-00000000"})
    assert (got.status_code, got.headers["retry-after"]) == (503, "1")
    assert "127.0.0.1" in caplog.text  # the log says why; the client is not told
    assert "127.0.0.1" not in got.text
    assert http.get("/healthz").status_code == 200
    assert http.get("/readyz").status_code == 503


def test_a_service_that_can_serve_is_ready(service: Service) -> None:
    assert service.http.get("/readyz").json()["status"] == "ready"


def test_a_database_without_the_schema_is_not_ready(tmp_path: Path) -> None:
    http = TestClient(create_app(Settings(data_dir=tmp_path)))
    assert http.get("/readyz").status_code == 503


def test_the_openapi_document_shows_the_bounds_of_the_settings(service: Service) -> None:
    schemas = service.http.get("/openapi.json").json()["components"]["schemas"]
    assert schemas["Lora"]["properties"]["rank"] == {
        "default": 16,
        "maximum": 256,
        "minimum": 1,
        "title": "Rank",
        "type": "integer",
    }


def test_the_openapi_document_is_of_this_version(service: Service) -> None:
    assert service.http.get("/openapi.json").json()["info"]["version"] == version("spard-service")


def test_the_api_never_imports_torch() -> None:
    code = "import sys, app.main, spard.commands; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/embeddings", "models answer at chat/completions"),
        ("/v1/batches/batch_1", "models answer at chat/completions"),
        ("/fine_tuning/jobs", "base_url end with it"),
        ("/chat/completions", "base_url end with it"),
        ("/openai/fine_tuning/jobs", "in place of AzureOpenAI."),
        ("/v1/deployments/lab/chat/completions", "in place of AzureOpenAI."),
        ("/v1/nothing", "Unknown URL (GET /v1/nothing)."),
    ],
)
def test_an_unknown_url_says_what_to_do(path: str, words: str, customer: TestClient) -> None:
    error = customer.get(path).json()["error"]
    assert error["code"] == "unknown_url"
    assert error["message"].endswith(words) or words in error["message"]


_PACKED = gzip.compress(b'{"model": "a", "training_file": "b"}', mtime=0)


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (_PACKED, {"content-encoding": "gzip"}, 415, "unsupported_encoding"),
        (b"abc", {"content-encoding": "br"}, 415, "unsupported_encoding"),
        (_PACKED, {}, 400, "invalid_json"),
        ('{"model": "é"}'.encode("latin-1"), {}, 400, "invalid_json"),
        (b'{"model": ' + b"[" * 100_000, {}, 400, "invalid_json"),
    ],
    ids=["gzip", "br", "gzip that is not announced", "latin-1", "deep"],
)
def test_a_body_that_cannot_be_read_has_a_code(
    body: bytes, headers: dict[str, str], status: int, code: str, customer: TestClient
) -> None:
    answer = customer.post(JOBS, content=body, headers={"content-type": "application/json", **headers})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("prompt", ["a", "b"], "prompt: send one text; several texts and token ids are not supported."),
        ("prompt", [[1, 2]], "prompt: send one text; several texts and token ids are not supported."),
        ("prompt", [1], "prompt: send one text; several texts and token ids are not supported."),
        ("prompt", [], "prompt: List should have at least 1 item"),
        ("prompt", None, "prompt: Input should be a valid string."),
        ("stop", ["a"] * 17, "stop: At most 16 items are allowed."),
        ("stop", "a" * 1001, "stop: String should have at most 1000 characters."),
        ("suffix", "b", "suffix: Input should be null."),
    ],
)
def test_of_a_value_of_several_types_the_one_that_it_has_is_told(
    field: str, value: Any, words: str, customer: TestClient
) -> None:
    error = customer.post("/v1/completions", json={"model": "a", "prompt": "a", field: value}).json()["error"]
    assert error["message"].startswith(words)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"hyperparameters": {"n_epochs": "AUTO"}}, "Input should be a valid integer, or 'auto'."),
        ({"hyperparameters": {"n_epochs": None}}, "Input should be a valid integer, or 'auto'."),
        ({"hyperparameters": {"learning_rate_multiplier": "fast"}}, "Input should be a valid number, or 'auto'."),
        ({"lora": {"target_modules": "all-linear"}}, "Input should be a valid list."),
        ({"hyperparameters": {"n_epochs": 0}}, "Input should be greater than or equal to 1."),
    ],
)
def test_a_value_of_no_type_that_is_meant_is_told_what_may_stand_there(
    extra: dict[str, Any], words: str, customer: TestClient
) -> None:
    error = customer.post(JOBS, json={"model": "a", "training_file": "b", **extra}).json()["error"]
    assert error["message"] == f"{error['param']}: {words}"


def test_words_of_json_are_used_for_what_must_be_false(customer: TestClient) -> None:
    ask = {"model": "a", "input": "a", "background": True}
    error = customer.post("/v1/responses", json=ask).json()["error"]
    assert error["message"] == "background: Input should be false."
