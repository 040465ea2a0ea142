"""Schemathesis on our own OpenAPI document: whatever is sent to whichever route, no 5xx and no undocumented status.

TEST_SCHEMA_CASES is how many requests are made in all; without it, a slice that fits into a minute.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.app.conformance.conftest import environment, finish_a_job
from tests.app.http.conftest import FILES, JOBS, Service

CASES = int(os.environ.get("TEST_SCHEMA_CASES", "1500"))
SLICE_S = 14  # at most for each of three runs, unless the number of requests was asked for


@pytest.fixture(scope="module")
def schemathesis() -> Path:
    """In an environment of its own: it wants other versions of what we test with."""
    return environment("schemathesis", "schemathesis==4.32.5").with_name("schemathesis")


@pytest.fixture(scope="module")
def owned(live: tuple[Service, str]) -> dict[str, str]:
    """Something to find behind each kind of id."""
    service, _ = live
    finish_a_job(service)
    customer = TestClient(service.app)
    customer.headers["authorization"] = f"Bearer {service.add_key('org-customer', 'admin', 'customer')}"
    upload = {"filename": "a.jsonl", "purpose": "fine-tune", "bytes": 1, "mime_type": "text/jsonl"}
    job = customer.get(JOBS).json()["data"][0]
    checkpoint = customer.get(f"{JOBS}/{job['id']}/checkpoints").json()["data"][0]
    return {
        "path.job_id": job["id"],
        "path.file_id": job["training_file"],
        "path.upload_id": customer.post("/v1/uploads", json=upload).json()["id"],
        "path.model": checkpoint["fine_tuned_model_checkpoint"],
        "path.project_id": "org-customer",
        "query.model": "lab/tiny-1",
        "query.validation_file": customer.get(FILES).json()["data"][0]["id"],
    }


def run(schemathesis: Path, live: tuple[Service, str], folder: Path, *options: str, **ids: str) -> str:
    """What it printed, if it found nothing; else the test fails with it."""
    service, url = live
    key = service.add_key("org-customer", "admin", "customer")
    config = folder / "schemathesis.toml"
    config.write_text("[parameters]\n" + "".join(f"{json.dumps(k)} = {json.dumps(v)}\n" for k, v in ids.items()))
    operations = len(service.app.openapi()["paths"])
    budget = [] if "TEST_SCHEMA_CASES" in os.environ else ["--max-time", str(SLICE_S)]
    command: list[Any] = [
        schemathesis, "--config-file", config, "run", url.removesuffix("/v1") + "/openapi.json",
        "-H", f"Authorization: Bearer {key}", "--checks", "not_a_server_error,status_code_conformance",
        "--max-examples", str(max(1, CASES // operations)), "--seed", "1", "--continue-on-failure", "--warnings", "off",
        "--no-color", *budget, *options,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# With these a key can shut itself out, and whatever came after would test little.
LOCKS = ["/v1/admin/projects/{project_id}/quota", "/v1/admin/keys/{key_id}", "/v1/admin/keys/{key_id}/rotate"]


def each(option: str, values: Iterable[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def test_whatever_is_sent_to_things_that_are_there_is_answered_as_documented(
    schemathesis: Path, live: tuple[Service, str], owned: dict[str, str], tmp_path: Path
) -> None:
    some = [*each("--exclude-path", LOCKS), "--exclude-method", "DELETE"]
    assert "passed" in run(schemathesis, live, tmp_path, "--phases", "fuzzing", *some, **owned)


def test_whatever_is_sent_to_any_route_is_answered_as_documented(
    schemathesis: Path, live: tuple[Service, str], tmp_path: Path
) -> None:
    some = each("--exclude-path", LOCKS)
    assert "passed" in run(schemathesis, live, tmp_path, "--phases", "coverage,fuzzing", *some)


def test_so_it_is_on_routes_that_can_shut_a_key_out(
    schemathesis: Path, live: tuple[Service, str], tmp_path: Path
) -> None:
    some = each("--include-path", LOCKS)
    assert "passed" in run(schemathesis, live, tmp_path, "--phases", "coverage,fuzzing", *some)
