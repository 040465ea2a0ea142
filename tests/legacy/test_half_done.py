"""A job that an earlier commit's worker has half done is carried on by the worker of today, from where it was.

The commits are the last two that stood on the main branch for hours before this was written, by the dates of its
history. The half-done job is made anew by that commit's code, in the environment of today, so nothing is recorded.
"""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest

from tests.legacy.installation import unpack
from tests.legacy.running import good
from tests.legacy.test_side_by_side import ASK, DECIDED, JOBS, Version, open_versions, provide, stop

COMMITS = ("4a1ed91d", "2ef88b63")
EPOCHS = 6  # so that it takes some seconds
TIMERS = {"SPARD_LEASE_S": "10", "SPARD_HEARTBEAT_S": "0.5", "SPARD_REAP_S": "0.5"}


def messages(client: httpx2.Client, job: str) -> list[str]:
    return [each["message"] for each in good(client.get(f"{JOBS}/{job}/events?limit=1000"))["data"]][::-1]


def begin(old: Version, client: httpx2.Client, job: str, sign: str) -> subprocess.Popen[bytes]:
    """Start a worker of the old version, and return it once an event of the job since then has a sign."""
    before, worker = len(messages(client, job)), old.worker()
    old.wait_until(lambda: any(re.match(sign, each) for each in messages(client, job)[before:]))
    return worker


@pytest.mark.parametrize("commit", COMMITS)
def test_a_half_done_job_of_an_earlier_commit_is_carried_on(
    commit: str, empty_postgres_url: str, tmp_path: Path
) -> None:
    with open_versions(commit, empty_postgres_url, tmp_path, {**TIMERS, **DECIDED}) as (old, new):
        model = unpack(tmp_path / "fixture", "sqlite").model
        old.migrate()
        with old.api() as client:
            file_id = provide(client, model)
            hyperparameters = {**cast("dict[str, Any]", ASK["hyperparameters"]), "n_epochs": EPOCHS}
            ask = ASK | {"training_file": file_id, "hyperparameters": hyperparameters}
            job = good(client.post(JOBS, json=ask))["id"]
            stop(begin(old, client, job, "Step "))  # it saves its resume state and hands the job back
            killed = begin(old, client, job, "Training goes on|Step ")
            killed.send_signal(signal.SIGKILL)  # and this one holds the job as it dies
            killed.wait()
            told = messages(client, job)
        new.migrate()
        new.worker()
        with new.api() as client:
            new.wait_until(lambda: good(client.get(f"{JOBS}/{job}"))["status"] in ("succeeded", "failed"))
            found, rest = good(client.get(f"{JOBS}/{job}")), messages(client, job)[len(told) :]
        assert found["status"] == "succeeded", (found, new.tail())
        assert any("lease_expired" in each for each in rest)
        assert any(each.startswith("Training goes on after step") for each in rest), rest
        assert not any(each.startswith("Step 1/") for each in rest), "its training began anew"
