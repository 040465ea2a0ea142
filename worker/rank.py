"""python -m worker.rank FOLDER PARENT: one of the processes of a job on several GPUs, started by torchrun.

All ranks take the same steps on the job's folder. Rank 0 reports, asks the judge and writes the results.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

from app.ops.processes import die_with_parent
from spard.models.imports import light_imports

with light_imports(first="spard.models.peft"):
    from spard import distributed
    from worker import pipeline
    from worker.distributed import write_failure
    from worker.failures import log_failure
    from worker.protocol import Report
    from worker.workdir import Folder

_STDIN = 0

log = logging.getLogger(__name__)


def main() -> None:
    """Do one rank's part of a folder's job; on failure, write why into the folder and exit with 1."""
    folder, rank = Folder(Path(sys.argv[1])), int(os.environ["RANK"])
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=f"%(levelname)s rank {rank} %(message)s")
    report = Report(os.dup(sys.stdout.fileno()) if rank == 0 else os.open(os.devnull, os.O_WRONLY))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        with distributed.process_group(), pipeline.judging(folder, report, _STDIN):
            pipeline.run(folder, report, folder.stop.exists if rank == 0 else lambda: False)
    except Exception as error:
        write_failure(folder, rank, log_failure(error, log))
        distributed.leave(1)  # exit at once: an orderly shutdown of a group with a failed rank can hang
    distributed.leave(0)


if __name__ == "__main__":
    main()
