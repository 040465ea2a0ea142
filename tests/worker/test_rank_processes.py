"""A job on several ranks, started by torchrun: what leaves the child is what one process would have left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from app.db.tables import TERMINAL, JobStatus
from app.errors import Unfit
from app.settings import Settings
from tests.worker.conftest import command
from tests.worker.parts import PLAIN, RECIPE, job_folder
from tests.worker.running import assert_only_sharding_differs, last_told_by_child, run_here
from tests.worker.shop import WAIT_S, Shop, at_work, wait_until
from worker import gpu
from worker.protocol import parse
from worker.workdir import Folder
from worker.worker import Worker

SHORT = [sys.executable, "-m", "tests.worker.short_of_memory"]


def set_processes(folder: Folder, count: int) -> Folder:
    facts = json.loads(folder.job.read_text())
    folder.job.write_text(json.dumps(facts | {"processes": count}))
    return folder


def test_two_ranks_with_a_part_of_the_model_each_leave_what_one_process_leaves(tmp_path: Path, model: Path) -> None:
    alone = job_folder(tmp_path / "1", model)
    run_here(alone)
    together = set_processes(job_folder(tmp_path / "2", model, recipe=replace(RECIPE, sharding="full")), 2)
    assert last_told_by_child(together) == {"kind": "done"}
    assert_only_sharding_differs(alone, together)


@pytest.mark.parametrize("count", [1, 2])
def test_one_of_several_ranks_ends_before_python_is_shut_down(count: int) -> None:
    """Threads of gloo that still hold tensors abort a process that shuts Python down, a time in some hundred."""
    work = "import atexit; atexit.register(print, 'shut down'); print('written')"
    told = [sys.executable, "-c", f"from spard import distributed; {work}; distributed.leave(3)"]
    found = subprocess.run(told, env=os.environ | {"WORLD_SIZE": str(count)}, stdout=subprocess.PIPE, text=True)
    assert (found.returncode, found.stdout.split("\n")[:-1]) == (3, ["written", "shut down"][: 3 - count])


def test_a_rank_that_dies_takes_the_child_along(tmp_path: Path, model: Path) -> None:
    folder = set_processes(job_folder(tmp_path / "job", model), 2)
    child = subprocess.Popen(
        [sys.executable, "-m", "worker.child", str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    assert child.stdin
    child.stdin.write(f"{folder.root}\n".encode())
    child.stdin.close()
    ranks: list[psutil.Process] = []
    while len(ranks) < 2 and child.poll() is None:
        ranks = [p for p in psutil.Process(child.pid).children() if "worker.rank" in command(p)]
        time.sleep(0.02)
    ranks[1].send_signal(signal.SIGKILL)
    assert child.wait(WAIT_S) == -signal.SIGKILL
    wait_until(lambda: not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks))


def test_ranks_save_and_stop_when_their_child_is_told_to(tmp_path: Path, model: Path) -> None:
    longer = replace(PLAIN, hyperparameters=replace(PLAIN.hyperparameters, n_epochs=50))
    folder = set_processes(job_folder(tmp_path / "job", model, recipe=longer, pool=None), 2)
    child = subprocess.Popen(
        [sys.executable, "-m", "worker.child", str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin
    assert child.stdout
    child.stdin.write(f"{folder.root}\n".encode())
    child.stdin.flush()
    told = map(parse, child.stdout)
    step = next(each for each in told if each and each["kind"] == "metrics")["step"]
    child.send_signal(signal.SIGTERM)
    rest = [each for each in told if each]
    child.stdout.close()
    child.stdin.close()
    assert child.wait(WAIT_S) == 0
    assert (rest[-1]["kind"], rest[-1]["code"], rest[-1]["retryable"]) == ("failed", "stopped", True)
    assert rest[-2]["kind"] == "resume_state"
    assert step <= rest[-2]["step"] < 300


def test_too_little_memory_of_a_rank_is_worth_one_attempt_with_half_the_piece(light_shop: Shop) -> None:
    worker = Worker(light_shop.settings(gpus_per_job=2, lease_s=60.0), SHORT)
    job_id = light_shop.add_job(waived=True, recipe=asdict(PLAIN))
    with at_work(worker):
        wait_until(lambda: light_shop.job(job_id).status in TERMINAL)
    events, job = light_shop.events(job_id), light_shop.job(job_id)
    assert (job.status, job.attempt) == (JobStatus.succeeded, 2)
    assert any("the next attempt takes 1 rows at a time" in event for event in events)
    assert any("batches of 4 are split into micro-batches of 1" in event for event in events)


def test_memory_that_is_too_little_for_a_rank_s_smallest_piece_ends_the_job(tmp_path: Path, model: Path) -> None:
    folder = set_processes(job_folder(tmp_path / "job", model, recipe=PLAIN, pool=None), 2)
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
