"""A job on several GPUs: torchrun starts a process for each (`worker.rank`), and ends all when one ends too early.

On several machines each has a child that does so for its own ranks, which meet where the job's folder says.

The child starts them and waits. What fails on a rank is left as its word, in its folder: of all words the child reports
the one that says most. A rank that a signal has ended takes the child along, and the parent sees that signal.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from dataclasses import asdict
from threading import Event

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from app.ops.processes import python
from worker.failures import Failed, Failure
from worker.workdir import NODE, Folder, read_meeting

log = logging.getLogger(__name__)

_PROGRAM = "worker.rank"
_MEET_S = 300  # at most, until the ranks of all machines have met
_LOOK_S = 0.1
_STDOUT = 1


def run_ranks(folder: Folder, count: int, messages: int, stop: Event) -> None:
    """Do the job on `count` ranks, or this machine's share of them; the first writes its messages to a file descriptor.

    They save and stop when a SIGTERM comes, or if `stop` was set before. Raises `Failed` with what a rank says, and
    ends this process by the signal that has ended one.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: folder.stop.touch())
    if stop.is_set():
        folder.stop.touch()
    own = os.dup(_STDOUT)
    os.dup2(messages, _STDOUT)
    try:
        elastic_launch(_config(folder, count), sys.executable)(
            *python(_PROGRAM, str(folder.root), str(os.getpid()))[1:]
        )
    except ChildFailedError as error:
        ended = [failure.exitcode for failure in error.failures.values()]
        log.error("ranks ended with %s", ended)
        raise Failed(_last_word(folder, ended)) from error
    finally:
        os.dup2(own, _STDOUT)
        os.close(own)


def _config(folder: Folder, count: int) -> LaunchConfig:
    """Return what torchrun is to start here, and where its ranks meet those of other machines."""
    met = read_meeting(folder)
    address = f"[{met.address}]" if ":" in met.address else met.address
    return LaunchConfig(
        min_nodes=met.nodes,
        max_nodes=met.nodes,
        nproc_per_node=count // met.nodes,
        run_id=folder.root.name,
        rdzv_backend="c10d" if met.nodes == 1 else "static",
        rdzv_endpoint=f"{address}:{met.port}",
        rdzv_configs={} if met.nodes == 1 else {"rank": int(os.environ.get(NODE, "0")), "timeout": _MEET_S},
        local_addr=met.address if met.nodes == 1 else None,
        max_restarts=0,
        monitor_interval=_LOOK_S,
        signals_to_handle="SIGHUP",  # SIGTERM asks the job to save and stop, and is no end
        logs_specs=DefaultLogsSpecs(log_dir=str(folder.root / "ranks")),
    )


def write_failure(folder: Folder, rank: int, what: Failure) -> None:
    """Write a rank's failure into the folder, where its worker reads it."""
    aside = folder.root / f".word.{rank}"
    aside.write_text(json.dumps(asdict(what)))
    aside.rename(folder.word(rank))


def _last_word(folder: Folder, ended: list[int]) -> Failure:
    """Return what says most: a failure that is known, before one that may follow from another rank's end."""
    words = [Failure(**json.loads(path.read_text())) for path in sorted(folder.root.glob("word.*"))]
    if known := [word for word in words if not word.is_unforeseen]:
        return known[0]
    for code in ended:
        if code < 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
    return words[0] if words else Failure("server_error", "A rank has ended.", retryable=True)
