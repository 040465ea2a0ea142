"""Whatever is sent, to whichever route: no 5xx, and every error in OpenAI's envelope."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.signing import signing_key
from tests.app.http.conftest import JOBS, Service

EXAMPLES = int(os.environ.get("TEST_FUZZ_EXAMPLES", "400"))
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=20))
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner))
# fmt: off
FIELDS = st.sampled_from([
    "model", "training_file", "validation_file", "suffix", "seed", "method", "hyperparameters", "integrations",
    "metadata", "safety", "lora", "type", "defense", "selection", "audit", "pool", "n_epochs", "tau", "filename",
    "purpose", "bytes", "mime_type", "part_ids", "md5", "project_ids", "alias", "source", "revision", "grader",
])
# fmt: on
BODIES = st.dictionaries(FIELDS, st.one_of(VALUES, st.dictionaries(FIELDS, VALUES, max_size=3)), max_size=6) | VALUES
QUERY = st.dictionaries(
    st.sampled_from(["limit", "after", "order", "purpose", "metadata[a]", "metadata", "name", "kind", "include_files"]),
    st.one_of(st.sampled_from(["-1", "0", "1", "99999999999", "null", "asc", "", "file-0"]), st.text(max_size=12)),
    max_size=3,
)
IDS = st.sampled_from(["ftjob-0", "file-0", "..", "%2e%2e", "a%00b", "x" * 300, "ft:a/b:c::d", "%ff", "'--", "None"])
HEADERS = st.dictionaries(
    st.sampled_from(["idempotency-key", "x-stainless-retry-count", "last-event-id", "range", "accept", "content-type"]),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20),
    max_size=2,
)


@pytest.fixture
def admin(service: Service, job_body: dict[str, Any]) -> TestClient:
    """May do everything, so that nothing is kept from the fuzz."""
    signing_key(service.app.state.settings)  # makes one
    client = service.client("org-customer", "admin", "customer")
    client.post(JOBS, json=job_body)
    return client


def test_nothing_that_is_sent_makes_a_5xx(service: Service, admin: TestClient) -> None:
    routes = [(verb, path) for path, verbs in service.app.openapi()["paths"].items() for verb in verbs]
    allowed = re.compile(r"/(healthz|readyz|metrics)$")

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
    )
    @given(st.sampled_from(routes), st.lists(IDS, min_size=2, max_size=2), QUERY, BODIES, HEADERS)
    def send(route: tuple[str, str], ids: list[str], query: dict[str, str], body: Any, headers: dict[str, str]) -> None:
        verb, path = route
        filled = re.sub(r"\{\w+\}", lambda _: ids.pop(), path)
        sent: dict[str, Any] = {"json": body} if verb == "post" and _is_json(body) else {}
        got = admin.request(verb, filled, params=query, headers=headers, **sent)
        assert got.status_code < 500 or allowed.search(path), (verb, path, got.text)
        if got.status_code >= 400 and not allowed.search(path):
            assert {"message", "type", "param", "code"} <= got.json()["error"].keys()
            assert got.headers["x-request-id"]

    send()


@pytest.mark.parametrize("limit", ["-1", "0", "x", "1e3", "99999999999999999999"])
def test_every_list_bounds_its_limit(service: Service, admin: TestClient, limit: str) -> None:
    job = admin.get(JOBS).json()["data"][0]["id"]
    for path, verbs in service.app.openapi()["paths"].items():
        if any(parameter["name"] == "limit" for parameter in verbs.get("get", {}).get("parameters", [])):
            got = admin.get(re.sub(r"\{\w+\}", job, path), params={"limit": limit})
            assert (got.status_code, got.json()["error"]["param"]) == (400, "limit"), path


def _is_json(value: Any) -> bool:
    """The client itself refuses what JSON cannot say."""
    if isinstance(value, float):
        return value == value and abs(value) != float("inf")
    if isinstance(value, str):
        return value.isprintable()
    if isinstance(value, dict):
        return all(_is_json(each) for each in (*value.keys(), *value.values()))
    return all(_is_json(each) for each in value) if isinstance(value, list) else True
