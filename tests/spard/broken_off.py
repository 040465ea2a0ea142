"""python -m tests.spard.broken_off MODELS OUT: runs on several processes that break off and go on, and what they leave.

`killed` are runs on two processes of which one ends at some moment by a signal, again and again, and `unbroken` is the
same run without; `FULL` is full fine-tuning that goes on with another number of processes after each step.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from spard.errors import Stopped
from tests.spard.ranks import ended, forked, join, trained

ADAPTER, FULL = "closed_form.lora", "gated.full"
NUMBERS = ((4, 2, 1), (1, 2, 4))  # of processes, step after step
KILLS = 50 if os.environ.get("SPARD_SOAK") == "1" else 4
SOON_S = 60.0  # in which a rank whose partner was killed has ended
_MOMENTS_S = 1.2  # from the meeting of two ranks to the end of the run, at about which one of them ends


def main() -> None:
    """Do both."""
    models, out = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    for numbers in NUMBERS:
        _go_on_with(models, out, numbers)
    _run(models, out, "unbroken", None)
    left = random.Random(7)
    was_killed = [_run(models, out, "killed", (kill % 2, left.uniform(0.0, _MOMENTS_S))) for kill in range(KILLS)]
    (out / "kills.json").write_text(json.dumps(sum(was_killed)))
    _run(models, out, "killed", None)


def _go_on_with(models: Path, out: Path, numbers: tuple[int, ...]) -> None:
    name = "-".join(map(str, numbers))
    for turn, count in enumerate(numbers):
        is_last = turn == len(numbers) - 1

        def work(rank: int, count: int = count, turn: int = turn, is_last: bool = is_last) -> None:
            join(out / f"store.{name}.{turn}", rank, count)
            more: dict[str, Any] = {} if is_last else {"should_stop": lambda: True}
            with suppress(Stopped):
                weights, _ = trained(models, FULL, "full", resume_states=out / f"states.{name}", **more)
                if rank == 0:
                    save_file(weights, out / f"{name}.safetensors")

        assert ended(forked(count, work)) == [0] * count


def _run(models: Path, out: Path, name: str, kill: tuple[int, float] | None) -> bool:
    """Start two ranks, one of which is to be killed after so many seconds; return whether the signal found it."""
    store = out / f"store.{name}.{len(list(out.iterdir()))}"
    started = forked(2, partial(_rank, models, out, name, store, kill))
    first, how = os.wait()
    others, began = [each for each in started if each != first], time.monotonic()
    ends = [*ended(others), os.waitstatus_to_exitcode(how)]
    assert time.monotonic() - began < SOON_S
    return -signal.SIGALRM in ends


def _rank(models: Path, out: Path, name: str, store: Path, kill: tuple[int, float] | None, rank: int) -> None:
    join(store, rank, 2)
    if kill and kill[0] == rank:
        signal.setitimer(signal.ITIMER_REAL, max(kill[1], 1e-3))  # whose signal ends us wherever we are
    weights, _ = trained(models, ADAPTER, "full", resume_states=out / f"states.{name}")
    if rank == 0:
        save_file(weights, out / f"{name}.safetensors")


if __name__ == "__main__":
    main()
