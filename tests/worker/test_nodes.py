"""A job on two machines, which are two workers' processes here: what they leave, and what happens when one is lost."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from threading import Thread

import psutil
import pytest

from app.db.tables import JobStatus
from tests.narrowing import require
from tests.worker.conftest import command
from tests.worker.parts import RECIPE, job_folder
from tests.worker.running import assert_only_sharding_differs, run_here
from tests.worker.shop import ROOT, WAIT_S, Shop, forget_waits, wait_until
from worker.protocol import parse
from worker.workdir import NODE, Folder, Rendezvous
from worker.worker import Exit, Worker

CUT = replace(RECIPE, sharding="full")
IS_SOAK = os.environ.get("SPARD_SOAK") == "1"
GPUS = (1, 2) if IS_SOAK else (2,)  # of each machine
VICTIMS = ("the follower", "a rank of the follower", "a rank of the worker") if IS_SOAK else ("the follower",)
LONGER = replace(
    RECIPE, hyperparameters=replace(RECIPE.hyperparameters, n_epochs=10), checkpoint_every_s=0.01, sharding="full"
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def run_together(folder: Folder, gpus: int) -> list[bytes]:
    """Two machines do the job of a folder; what each child says last."""
    facts = json.loads(folder.job.read_text())
    folder.job.write_text(json.dumps(facts | {"processes": 2 * gpus}))
    folder.meeting.write_text(json.dumps(asdict(Rendezvous(2, "127.0.0.1", free_port()))))
    told = [sys.executable, "-m", "worker.child", str(os.getpid())]
    children = [
        subprocess.Popen(told, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | more)
        for more in (dict[str, str](), {NODE: "1"})
    ]
    for child in children:
        require(child.stdin).write(f"{folder.root}\n".encode())
        require(child.stdin).flush()
    return [child.communicate(timeout=WAIT_S)[0].splitlines()[-1] for child in children]


@pytest.mark.parametrize("gpus", GPUS)
def test_ranks_on_two_machines_leave_what_one_process_leaves(tmp_path: Path, model: Path, gpus: int) -> None:
    alone = job_folder(tmp_path / "1", model)
    run_here(alone)
    together = job_folder(tmp_path / "2", model, recipe=CUT)
    assert [parse(line) for line in run_together(together, gpus)] == [{"kind": "done"}] * 2
    assert_only_sharding_differs(alone, together)


@pytest.fixture(scope="module")
def undisturbed_adapter(tmp_path_factory: pytest.TempPathFactory, model: Path) -> bytes:
    """The adapter that two machines make when nothing happens to them."""
    folder = job_folder(tmp_path_factory.mktemp("undisturbed") / "job", model, recipe=LONGER)
    assert [parse(line) for line in run_together(folder, 1)] == [{"kind": "done"}] * 2
    return (folder.adapter / "adapter_model.safetensors").read_bytes()


@contextmanager
def following(shop: Shop, job_id: str, token: int, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The second machine. It is told where the shared folder is, and of no database, storage or key."""
    told = {"DATA_DIR": shop.folder, "NODES_PER_JOB": 2, "NODES_PORT": port, "NODES_WAIT_S": WAIT_S}
    env = os.environ | {f"SPARD_{name}": str(value) for name, value in told.items()}
    to_whom = ["--leader", "127.0.0.1", "--job", job_id, "--token", str(token)]
    follower = subprocess.Popen([sys.executable, "-m", "worker.follower", *to_whom], cwd=ROOT, env=env)
    try:
        yield follower
    finally:
        follower.kill()
        follower.wait()


@contextmanager
def leading(shop: Shop, job_id: str, token: int, port: int) -> Iterator[list[Exit]]:
    """The first machine: a worker of this job. At the block's end it has ended, and its code is there."""
    settings = shop.settings(nodes_per_job=2, nodes_port=port, nodes_wait_s=WAIT_S, sharding="full", lease_s=600.0)
    worker, codes = Worker(settings), list[Exit]()
    thread = Thread(target=lambda: codes.append(worker.run_one(job_id, token)))
    thread.start()
    try:
        yield codes
    finally:
        thread.join(WAIT_S)
        worker.end()
        thread.join()


def rank_processes(process: psutil.Process) -> list[psutil.Process]:
    return [each for each in process.children(recursive=True) if "worker.rank" in command(each)]


def kill(victim: str, follower: psutil.Process) -> None:
    """One of them dies as a machine takes it: the other machine is told nothing."""
    others = rank_processes(follower)
    ours = [each for each in rank_processes(psutil.Process()) if each not in others]
    found = {"the follower": [follower], "a rank of the follower": others, "a rank of the worker": ours}
    found[victim][-1].send_signal(signal.SIGKILL)


def job_step(shop: Shop, job_id: str) -> int:
    progress = shop.job(job_id).progress
    return (progress["step"] or 0) if progress else 0


@pytest.mark.parametrize("victim", VICTIMS)
def test_one_that_is_killed_ends_them_all_and_the_next_attempt_makes_the_same_adapter(
    light_shop: Shop, undisturbed_adapter: bytes, victim: str
) -> None:
    at = Random(victim).randrange(1, 40)
    job_id = light_shop.add_job(waived=True, recipe=asdict(replace(LONGER, sharding="none")))
    port = free_port()
    with following(light_shop, job_id, 0, port) as follower:
        with leading(light_shop, job_id, 0, port) as codes:
            wait_until(lambda: job_step(light_shop, job_id) >= at or bool(codes))
            assert codes == []
            kill(victim, psutil.Process(follower.pid))
        assert follower.wait(WAIT_S) == (-signal.SIGKILL if victim == "the follower" else 0)
    job = light_shop.job(job_id)
    assert (codes, job.status, job.attempt) == ([Exit.done], JobStatus.queued, 1)
    if victim == "the follower":
        assert any("A machine that this job ran on was lost" in event for event in light_shop.events(job_id))
    forget_waits(light_shop)
    with following(light_shop, job_id, 1, port) as follower, leading(light_shop, job_id, 1, port) as codes:
        assert follower.wait(WAIT_S) == 0
    job = light_shop.job(job_id)
    assert (codes, job.status, job.attempt) == ([Exit.done], JobStatus.succeeded, 2)
    assert weights(light_shop.content(require(job.adapter)["storage_key"])) == undisturbed_adapter


def weights(archive: bytes) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        member = tar.extractfile(next(name for name in tar.getnames() if name.endswith("adapter_model.safetensors")))
        return require(member).read()
