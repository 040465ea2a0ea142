"""python -m tests.spard.select_mapped FOLDER K: choose K rows of the shards in FOLDER, and tell what memory it took.

Prints JSON: the chosen rows, and the anonymous bytes of this process (RssAnon of Linux) before and at their most.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from threading import Event, Thread

import torch
from safetensors import safe_open
from torch import Tensor

from spard.config import Selection
from spard.selection.select import choose
from spard.selection.shards import Shards


def map_rows(path: Path) -> Tensor:
    """Map the rows of a file."""
    with safe_open(path, framework="pt") as file:
        rows: Tensor = file.get_tensor("rows")
    return rows


def anonymous() -> int:
    """Return the bytes of this process that no file stands behind."""
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class Peak:
    """The most anonymous bytes inside the block, looked at every few milliseconds."""

    def __init__(self) -> None:
        self.bytes, self._is_over = 0, Event()
        self._thread = Thread(target=self._look)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(0.002):
            self.bytes = max(self.bytes, anonymous())


def main() -> None:
    """Do it."""
    torch.set_num_threads(1)
    folder, k = Path(sys.argv[1]), int(sys.argv[2])
    task_MD = map_rows(folder / "task.safetensors").clone()
    choose(task_MD, task_MD[:4], 2, Selection(), 0)  # what is loaded at the first call is not the pool's
    before = anonymous()
    with Peak() as peak:
        pool = Shards([map_rows(path) for path in sorted(folder.glob("pool-*.safetensors"))])
        chosen = choose(pool, task_MD, k, Selection(), 0)
    sys.stdout.write(json.dumps({"chosen": chosen.indices, "before": before, "peak": peak.bytes, "rows": len(pool)}))


if __name__ == "__main__":
    main()
