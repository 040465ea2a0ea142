"""python -m worker.rank FOLDER RANK COUNT PARENT: takes part in the training of a job that another child runs.

It makes the same data from the same folder, takes the same steps on its share of every batch, and leaves nothing.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

import torch

from app.ops.processes import die_with_parent
from worker import pipeline
from worker.protocol import Report
from worker.workdir import Folder


def main() -> None:
    """Take part in the training until the process that started it says that it is over."""
    folder, rank, count, parent = Path(sys.argv[1]), *map(int, sys.argv[2:])
    die_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the first process says when to stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=f"%(levelname)s rank {rank} %(message)s")
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    pipeline.take_part(Folder(folder), Report(os.open(os.devnull, os.O_WRONLY)), rank, count)


if __name__ == "__main__":
    main()
