"""Measure the server's time and the number of SQL statements for each dashboard page, at ten thousand jobs.

    python -m benchmarks.pages [--jobs 10000]

The application runs in this process on SQLite, with `--jobs` jobs of eleven projects (1% queued, the others succeeded
or failed with an audit), 200 held adapters, 5,000 webhook deliveries and 5,000 rows in the audit log. Each page is
requested once to warm up and five times to measure; the result is the median. A page may take 200 ms. The last figure
is what a browser with an empty cache loads, with style sheets, scripts and pictures.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from fastapi.testclient import TestClient
from pydantic import SecretStr
from sqlalchemy import Engine, event, insert

from app import audit_log, db, keys
from app.db.base import utc_now
from app.db.tables import HeldAdapter, Job, JobStatus, Project, WebhookDelivery, WebhookEndpoint
from app.jobs import fleet
from app.jobs.fleet import Presence
from app.main import create_app
from app.settings import Settings
from tests.app.parts import SPEC

_FILE = re.compile(r'(?:src|href)="(/[^"]+\.(?:css|js|svg|woff2)[^"]*)"')
FLOOR_MS = 200.0
TIMES = 5
PROJECTS = 10
PAGES = (
    "/jobs",
    "/jobs?search=42",
    "/jobs/ftjob-00022",
    "/jobs/new",
    "/files",
    "/models",
    "/provider",
    "/provider/jobs",
    "/provider/jobs?search=42",
    "/provider/jobs?search=nothing",
    "/provider/jobs?status=queued",
    "/provider/policies",
    "/provider/waivers",
    "/provider/data",
    "/provider/models",
    "/provider/projects",
    "/provider/projects/org-1",
    "/provider/webhooks",
    "/provider/webhooks?status=failed",
    "/provider/audit-log",
    "/v1/fine_tuning/jobs?limit=100",
    "/v1/admin/jobs?limit=100",
)
RECIPE = {
    "defense": {"type": "spard"},
    "selection": {"method": "relevance_diversity"},
    "lora": {"rank": 16},
    "hyperparameters": {"n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": "auto"},
    "audit": {},
    "seed": 1,
    "max_seq_length": None,
    "learning_rate": None,
}
GATES = {JobStatus.succeeded: "pass", JobStatus.failed: "fail"}


def main() -> None:
    """Fill the database, time every page, and compare the slowest with the limit of 200 ms."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=10_000)
    asked = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.platform()}, load {os.getloadavg()[0]:.1f}", flush=True)
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/spard.db"
        db.upgrade_schema(url)
        app = create_app(Settings(data_dir=Path(folder), database_url=SecretStr(url)))
        engine: Engine = app.state.engine
        browser = TestClient(app, headers={"accept": "text/html"})
        browser.post("/sign-in", data={"key": fill(engine, asked.jobs)})
        for path in PAGES:
            milliseconds, statements, size = time_page(browser, engine, path)
            worst = max(worst, milliseconds)
            told = f"{milliseconds:8.1f} ms {statements:4d} statements {size / 1e3:8.1f} kB"
            print(f"{path:36s} {told} {loaded_bytes(browser, path) / 1e3:8.1f} kB loaded", flush=True)
    print(f"{'ok' if worst <= FLOOR_MS else 'BROKEN'}: at most {worst:.1f} ms")


def time_page(browser: TestClient, engine: Engine, path: str) -> tuple[float, int, int]:
    """Return the median milliseconds of a page, the SQL statements per request, and the size of the answer in bytes."""
    statements = 0

    def count(*rest: object) -> None:
        nonlocal statements
        statements += rest[2] != "BEGIN"

    browser.get(path)
    taken = []
    event.listen(engine, "before_cursor_execute", count)
    for _ in range(TIMES):
        began = time.perf_counter()
        answer = browser.get(path)
        taken.append((time.perf_counter() - began) * 1000)
        if answer.status_code != 200:
            raise SystemExit(f"{path}: {answer.status_code}")
    event.remove(engine, "before_cursor_execute", count)
    return statistics.median(taken), statements // TIMES, len(answer.content)


def loaded_bytes(browser: TestClient, path: str) -> int:
    """Return the bytes of a page's answer and of all files of the service that it names, compressed if they are so."""
    files = set(_FILE.findall(browser.get(path).text))
    total = 0
    for each in (path, *sorted(files)):
        with browser.stream("GET", each, headers={"accept-encoding": "gzip"}) as answer:
            total += sum(map(len, answer.iter_raw()))
    return total


def fill(engine: Engine, count: int) -> str:
    """Insert all rows and return the secret of a provider's key, which can read all of them."""
    with db.transaction(engine) as session:
        session.add_all(Project(id=f"org-{i}", name=f"Project {i}") for i in range(PROJECTS + 1))
        session.flush()
        key, secret = keys.create(session, "org-0", "benchmark", ["admin", "customer"])
        fleet.note(session, Presence("gpu-1:1", "gpu-1", "0", ["GPU"], []))
        session.execute(insert(Job), list(job_rows(count, key.id)))
        held = [{"job_id": f"ftjob-{i:05}", "storage_key": "k", "sha256": "0", "bytes": 1} for i in range(1, 401, 2)]
        session.execute(insert(HeldAdapter), [each | {"manifest_sha256": "0"} for each in held])
        endpoint = WebhookEndpoint(project_id="org-1", url="https://example.com", events=[], secret="s")  # noqa: S106
        session.add(endpoint)
        session.flush()
        session.execute(insert(WebhookDelivery), list(_deliveries(endpoint.id)))
        for i in range(5_000):
            audit_log.record(session, "job.created", f"ftjob-{i:05}")
    return secret


def job_rows(count: int, key_id: str) -> Iterator[dict[str, object]]:
    """Yield `count` job rows of eleven projects as mappings: 1% queued, the others succeeded or failed.

    `key_id` is the API key that created them. `benchmarks.api` uses these rows, too.
    """
    now = utc_now()
    for i in range(count):
        status = JobStatus.queued if i % 100 == 0 else JobStatus.failed if i % 2 else JobStatus.succeeded
        gate = GATES.get(status)
        asr = {"base": 0.01, "adapter": 0.02, "ci95": [0.0, 0.04], "n": 500, "n_unscored": 0}
        yield {
            "id": f"ftjob-{i:05}",
            "project_id": f"org-{i % (PROJECTS + 1)}",
            "key_id": key_id,
            "created_at": now - timedelta(minutes=i),
            "finished_at": now if gate else None,
            "model": f"model-{i % 7}",
            "training_file": "file-1",
            "recipe": RECIPE,
            "spec": SPEC,
            "request_hash": "0",
            "status": status,
            "error": {"code": "safety_gate_failed", "message": "No.", "param": None} if gate == "fail" else None,
            "safety": {"gate": {"decision": gate, "reasons": ["Attacks succeed."]}, "asr": asr} if gate else None,
        }


def _deliveries(endpoint_id: str) -> Iterator[dict[str, object]]:
    for i in range(5_000):
        status = "failed" if i % 50 == 0 else "delivered"
        yield {
            "endpoint_id": endpoint_id,
            "event_id": f"evt_{i}",
            "type": "fine_tuning.job.failed",
            "job_id": f"ftjob-{i:05}",
            "status": status,
        }


if __name__ == "__main__":
    main()
