"""Start a job's ranks with torchrun: one process (`worker.rank`) for each GPU; when one ends early, all end.

On several machines the child of each machine starts that machine's ranks; they meet at the address in the job's folder.

The child starts the ranks and waits. A rank that fails writes its failure to the folder, and the child reports the most
specific of them. If a signal ended a rank, the child ends itself by the same signal, so its parent sees that signal.
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
    """Run the job on `count` ranks over all machines, of which this machine starts its share, and wait for them.

    Rank 0 writes its messages to the file descriptor `messages`. The ranks save and stop on SIGTERM, or at once if
    `stop` is already set. Raises `Failed` with the most specific failure of a rank. If a signal ended a rank, this
    process ends by the same signal.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: folder.stop.touch())
    if stop.is_set():
        folder.stop.touch()
    # Ranks inherit our standard output, so point it at the message descriptor while they run.
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
    """Return torchrun's settings: this machine's number of ranks, and the address where all ranks meet."""
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
        signals_to_handle="SIGHUP",  # not SIGTERM: it asks the job to save and stop, and must not end the ranks
        logs_specs=DefaultLogsSpecs(log_dir=str(folder.root / "ranks")),
    )


def write_failure(folder: Folder, rank: int, what: Failure) -> None:
    """Write a rank's failure into the folder, where the child that started the ranks reads it."""
    aside = folder.root / f".word.{rank}"
    aside.write_text(json.dumps(asdict(what)))
    aside.rename(folder.word(rank))


def _last_word(folder: Folder, ended: list[int]) -> Failure:
    """Return the most specific failure of the ranks; end this process by a rank's signal if only that explains the end.

    A failure with a known cause comes first: an unforeseen one may only follow from the end of another rank.
    """
    words = [Failure(**json.loads(path.read_text())) for path in sorted(folder.root.glob("word.*"))]
    if known := [word for word in words if not word.is_unforeseen]:
        return known[0]
    for code in ended:
        if code < 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
    return words[0] if words else Failure("server_error", "A rank has ended.", retryable=True)
