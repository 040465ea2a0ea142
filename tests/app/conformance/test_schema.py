"""Schemathesis on our own OpenAPI document: whatever is sent to whichever route, no 5xx and no undocumented status.

TEST_SCHEMA_CASES is how many requests are made in all, at least; without it, a slice that fits into half a minute.
The service counts them itself.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.app.conformance.conftest import environment, finish_a_job
from tests.app.http.conftest import FILES, JOBS, Service

CASES = int(os.environ.get("TEST_SCHEMA_CASES", "600"))
IS_ASKED = "TEST_SCHEMA_CASES" in os.environ
SLICES_S = (6, 60, 600)  # at most for each of four runs, unless the number of requests was asked for


@pytest.fixture(scope="module")
def schemathesis() -> Path:
    """In an environment of its own: it wants other versions of what we test with."""
    return environment("schemathesis", "schemathesis==4.32.5").with_name("schemathesis")


@pytest.fixture(scope="module")
def known_ids(live: tuple[Service, str]) -> dict[str, str]:
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


@dataclass(frozen=True)
class Fuzz:
    """Schemathesis, and the service that it is let loose on."""

    program: Path
    service: Service
    url: str
    folder: Path

    def run(self, share: float, *options: str, **ids: str) -> None:
        """About that share of all requests, on operations that `options` choose; fails with what it has found.

        A busy machine may come to no request within a slice of time: then the next slice is longer.
        """
        key = self.service.add_key("org-customer", "admin", "customer")
        config = self.folder / "schemathesis.toml"
        config.write_text("[parameters]\n" + "".join(f"{json.dumps(k)} = {json.dumps(v)}\n" for k, v in ids.items()))
        command: list[Any] = [
            self.program, "--config-file", config, "run", self.url.removesuffix("/v1") + "/openapi.json",
            "-H", f"Authorization: Bearer {key}", "--checks", "not_a_server_error,status_code_conformance",
            "--max-examples", str(max(1, round(CASES * share))), "--seed", "1", "--continue-on-failure",
            "--warnings", "off", "--no-color", *options,
        ]  # fmt: skip
        for budget in [[]] if IS_ASKED else [["--max-time", str(seconds)] for seconds in SLICES_S]:
            done = subprocess.run(
                [*command, *budget], capture_output=True, text=True, cwd=self.folder, check=False, timeout=3600
            )
            assert done.returncode == 0, done.stdout + done.stderr
            if "passed" in done.stdout:
                return
        pytest.fail(f"nothing was asked:\n{done.stdout}")


@pytest.fixture
def fuzz(schemathesis: Path, live: tuple[Service, str], tmp_path: Path) -> Fuzz:
    return Fuzz(schemathesis, *live, tmp_path)


_COUNTED = re.compile(r'spard_http_requests_total\{method="(.+?)",route="(.+?)",status="(\d+)"\} (\d+)')
OPERATIONS = 69  # of the document, about; of the rest of the requests, most are the coverage phase's
STEPS = 6  # of a scenario, about

# With these a key can shut itself out, and whatever came after would test little.
LOCKS = ["/v1/admin/projects/{project_id}/quota", "/v1/admin/keys/{key_id}", "/v1/admin/keys/{key_id}/rotate"]


def each(option: str, values: Iterable[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def test_whatever_is_sent_to_things_that_are_there_is_answered_as_documented(
    fuzz: Fuzz, known_ids: dict[str, str]
) -> None:
    some = [*each("--exclude-path", LOCKS), "--exclude-method", "DELETE"]
    fuzz.run(0.6 / OPERATIONS, "--phases", "fuzzing", *some, **known_ids)


def test_whatever_is_sent_to_any_route_is_answered_as_documented(fuzz: Fuzz) -> None:
    fuzz.run(0.6 / OPERATIONS, "--phases", "coverage,fuzzing", *each("--exclude-path", LOCKS))


def test_what_one_answer_names_is_answered_as_documented_by_the_next(fuzz: Fuzz) -> None:
    fuzz.run(0.1 / STEPS, "--phases", "stateful", *each("--exclude-path", LOCKS))


def test_so_it_is_on_routes_that_can_shut_a_key_out(fuzz: Fuzz) -> None:
    fuzz.run(0.1 / OPERATIONS, "--phases", "coverage,fuzzing", *each("--include-path", LOCKS))


@pytest.mark.skipif(not IS_ASKED, reason="only a number of requests that was asked for is held to")
def test_every_operation_was_asked_often_enough_and_none_broke(live: tuple[Service, str]) -> None:
    service, _ = live
    lines = _COUNTED.findall(TestClient(service.app).get("/metrics").text)
    asked = {(method, route.replace(":path", "")) for method, route, _, _ in lines}
    documented = {(verb.upper(), path) for path, verbs in service.app.openapi()["paths"].items() for verb in verbs}
    statuses = Counter({"5": 0})
    for *_, status, count in lines:
        statuses[status[0]] += int(count)
    logging.getLogger(__name__).warning("%d requests: %s", statuses.total(), dict(statuses))
    assert documented <= asked
    assert (statuses["5"], statuses.total() >= CASES) == (0, True), statuses
