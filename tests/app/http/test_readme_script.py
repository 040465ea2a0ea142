"""README's own script, as it stands there, prints the error and its cure where a job ends early."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest
from fastapi.testclient import TestClient

from app import db
from app.jobs import lease
from spard.errors import InvalidData, SpardError, TooManyRowsDropped, TrainAuditOverlap
from spard.evaluation.suites import HIDDEN
from spard.pipeline.row_signal import named_lines
from tests import blocks
from tests.app.http.conftest import Service, rows
from worker.failures import failure

ENDS_S = 120.0  # no bound on speed, on whatever machine
DROPPED = TooManyRowsDropped(
    f"Of 10 rows, 10 look harmful and would not be trained on; at most 10% may be left out: {named_lines([1, 2, 3])}",
    "training_file",
)


def run_script(service: Service, folder: Path, url: str, content: bytes) -> subprocess.CompletedProcess[str]:
    """Run README's script on a file of this content, with the address, key and model that the reader fills in."""
    (script,) = (block.text for block in blocks.to_run("README.md", "python"))
    there = {
        "http://127.0.0.1:8000/v1": url,
        "sk-spard-...": service.add_key("org-customer", "customer"),
        "my-model": "lab/tiny-1",
        "sleep(5)": "sleep(0.1)",
    }
    for name, value in there.items():
        assert name in script
        script = script.replace(name, value)
    (folder / "train.jsonl").write_bytes(content)
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=ENDS_S,
        check=False,
    )


@contextmanager
def failing_worker(service: Service, error: SpardError) -> Iterator[None]:
    """Run a worker meanwhile whose first job fails with this error."""

    is_over = Event()

    def work() -> None:
        while not is_over.wait(0.05):
            with db.transaction(service.app.state.engine) as session:
                if claim := lease.claim(session, "worker", 60):
                    assert lease.fail(session, claim, failure(error).error())
                    return

    worker = Thread(target=work)
    worker.start()
    try:
        yield
    finally:
        is_over.set()
        worker.join()


@pytest.mark.parametrize(
    ("error", "told", "cure"),
    [
        (DROPPED, "failed: Of 10 rows, 10 look harmful", "start it again without them there, or ask the provider."),
        (TrainAuditOverlap(HIDDEN, "training_file"), "failed: The training file holds prompts", "Remove rows copied"),
        (
            InvalidData("line 3 has no answer"),
            "failed: The job failed due to an invalid",
            "correct the file and upload",
        ),
    ],
)
def test_a_job_that_ends_early_is_told_with_its_cure(
    service: Service,
    provider_with_model: TestClient,
    url: str,
    tmp_path: Path,
    error: SpardError,
    told: str,
    cure: str,
) -> None:
    with failing_worker(service, error):
        done = run_script(service, tmp_path, url, rows(10))
    assert done.returncode == 1
    assert done.stderr.startswith(told)
    assert cure in done.stderr
    assert len(done.stderr.splitlines()) == 1  # no traceback


def test_a_file_that_cannot_be_trained_on_is_told_with_its_cure(
    service: Service, provider_with_model: TestClient, url: str, tmp_path: Path
) -> None:
    """With `SPARD_BAD_FILES=fail` the job is made and fails at once."""
    service.app.state.settings = service.app.state.settings.model_copy(update={"bad_files": "fail"})
    done = run_script(service, tmp_path, url, rows(3))
    assert done.returncode == 1
    assert done.stderr.startswith("failed: The job failed due to an invalid training file.")
    assert "3 example" in done.stderr
    assert done.stderr.rstrip().endswith("Correct the file.")
