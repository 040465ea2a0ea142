"""A job that several processes train together: what leaves the child is what one process would have trained."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from threading import Thread

import psutil
import pytest
from safetensors.torch import load_file

from app.db.tables import TERMINAL, JobStatus
from app.errors import Unfit
from app.settings import Settings
from tests.spard.parts import away
from tests.worker.conftest import command
from tests.worker.parts import PLAIN, job_folder
from tests.worker.shop import WAIT_S, Shop, until
from worker import gpu, pipeline
from worker.protocol import Report, parse
from worker.workdir import Folder
from worker.worker import Worker

SHORT = [sys.executable, "-m", "tests.worker.short_of_memory"]


def shared(folder: Folder, count: int) -> Folder:
    facts = json.loads(folder.job.read_text())
    folder.job.write_text(json.dumps(facts | {"processes": count}))
    return folder


def test_two_processes_leave_the_adapter_that_one_leaves(tmp_path: Path, model: Path) -> None:
    found = []
    for count in (1, 2):
        folder = shared(job_folder(tmp_path / str(count), model), count)
        sink = os.open(os.devnull, os.O_WRONLY)
        pipeline.run(folder, Report(sink), lambda: False)
        os.close(sink)
        found.append(load_file(folder.adapter / "adapter_model.safetensors"))
    assert away([found[1][name] for name in found[0]], found[0].values()) < 1e-2
    assert [command(p) for p in psutil.Process().children() if "worker.rank" in command(p)] == []


def test_a_partner_that_dies_takes_the_child_along(tmp_path: Path, model: Path) -> None:
    folder = shared(job_folder(tmp_path / "job", model), 2)
    child = subprocess.Popen(
        [sys.executable, "-m", "worker.child", str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    assert child.stdin
    child.stdin.write(f"{folder.root}\n".encode())
    child.stdin.close()
    partner = None
    while partner is None and child.poll() is None:
        found = [p for p in psutil.Process(child.pid).children() if "worker.rank" in command(p)]
        partner = found[0] if found else None
        time.sleep(0.02)
    assert partner is not None
    partner.send_signal(signal.SIGKILL)
    assert child.wait(WAIT_S) == 1


def test_too_little_memory_of_a_partner_is_worth_one_attempt_with_half_the_piece(light_shop: Shop) -> None:
    worker = Worker(light_shop.settings(gpus_per_job=2, lease_s=60.0), SHORT)
    job_id = light_shop.add_job(waived=True, recipe=asdict(PLAIN))
    thread = Thread(target=worker.run)
    thread.start()
    try:
        until(lambda: light_shop.job(job_id).status in TERMINAL)
    finally:
        worker.end()
        thread.join()
    events, job = light_shop.events(job_id), light_shop.job(job_id)
    assert (job.status, job.attempt) == (JobStatus.succeeded, 2)
    assert any("the next attempt takes 1 rows at a time" in event for event in events)
    assert any("batches of 4 go in pieces of 1" in event for event in events)


def test_memory_that_is_too_little_for_a_partner_s_smallest_piece_ends_the_job(tmp_path: Path, model: Path) -> None:
    folder = shared(job_folder(tmp_path / "job", model, recipe=PLAIN, pool=None), 2)
    (folder.stage / "pieces.json").write_text('{"micro_batch_size": 1}')
    child = subprocess.run(
        [*SHORT, str(os.getpid())],
        input=f"{folder.root}\n".encode(),
        stdout=subprocess.PIPE,
        env=os.environ | {"HELD_ROWS": "0"},
        timeout=WAIT_S,
        check=False,
    )
    last = parse(child.stdout.splitlines()[-1]) or {}
    assert (last["kind"], last["code"], last["retryable"]) == ("failed", "gpu_oom", False)


def test_more_gpus_for_a_job_than_there_are_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "count", lambda: 1)
    with pytest.raises(Unfit, match="SPARD_GPUS_PER_JOB is 2, but the driver shows 1"):
        gpu.check(Settings(gpus_per_job=2))
