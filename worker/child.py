"""python -m worker.child PARENT: the process that does one job in its folder and then ends.

It imports its libraries, and may read a base model, before it reads the name of its folder, so a waiting child starts
at once. Its reports go to the descriptor that was its standard output; everything else that is printed goes to its
log, on standard error.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from types import FrameType

from app.ops.processes import die_with_parent
from spard.models.imports import light_imports

with light_imports(first="spard.models.peft"):
    from spard.release.proof import CleanProcess
    from worker import pipeline
    from worker.distributed import run_ranks
    from worker.failures import Failed, log_failure
    from worker.preloaded_model import Holder, wait_for_folder
    from worker.protocol import Report
    from worker.workdir import NODE, Folder, read_assignment

_STDIN = 0

log = logging.getLogger(__name__)


def main() -> None:
    """Read a folder's name from standard input and do its job; do nothing if the input ends first."""
    die_with_parent(int(sys.argv[1]))
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    report = Report(os.dup(sys.stdout.fileno()))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    stop = Event()

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then tells us
    is_first = NODE not in os.environ  # a follower's child makes no result that has to be proved
    with CleanProcess() if is_first else nullcontext() as clean:
        holder = Holder()
        path = wait_for_folder(_STDIN, holder)
        if path:
            work(Folder(Path(path)), report, stop, clean, holder)


def work(folder: Folder, report: Report, stop: Event, clean: CleanProcess | None, holder: Holder) -> None:
    """Run the job of a folder and report `done`; report any exception as a `failed` message."""
    try:
        assignment = read_assignment(folder)
        if assignment.processes > 1 and not assignment.audits:
            holder.drop()
            run_ranks(folder, assignment.processes, report.fd, stop)
        else:
            with pipeline.judging(folder, report, _STDIN):
                pipeline.run(folder, report, stop.is_set, clean, holder)
    except Failed as error:
        report.report_failed(error.what.code, error.what.message, error.what.param, retryable=error.what.retryable)
    except Exception as error:
        what = log_failure(error, log)
        report.report_failed(what.code, what.message, what.param, retryable=what.retryable)
    else:
        report.report_done()


if __name__ == "__main__":
    main()
