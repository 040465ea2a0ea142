"""python -m tests.spard.broken_off MODELS OUT SEED: runs on several processes that break off, and what they leave.

`killed` is a run on two processes, one of which is ended by a signal at some moment while it trains, again and again;
`unbroken` is the same run without. What was killed when is in `kills.json`. `FULL` is full fine-tuning that goes on
with another number of processes after each step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from spard.errors import Stopped
from tests.spard.ranks import SOON_S, exit_codes, fork_ranks, join, train_case

ADAPTER, FULL = "closed_form.lora", "gated.full"
NUMBERS = ((4, 2, 1), (1, 2, 4))  # of processes, step after step
EPOCHS, STEPS = 20, 60
KILLS = 50 if os.environ.get("SPARD_SOAK") == "1" else 6
_STEP_S = 0.03  # about as long as a step takes


def main() -> None:
    """Do both."""
    models, out, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    for numbers in NUMBERS:
        _run_models(models, out, numbers)
    assert _run(models, out, "unbroken") == [0, 0]
    (out / "kills.json").write_text(json.dumps([*_kill_and_resume(models, out, Random(seed))]))


def _run_models(models: Path, out: Path, numbers: tuple[int, ...]) -> None:
    name = "-".join(map(str, numbers))
    for turn, many in enumerate(numbers):
        is_last = turn == len(numbers) - 1

        def work(rank: int, many: int = many, turn: int = turn, is_last: bool = is_last) -> None:
            join(out / f"store.{name}.{turn}", rank, many)
            more: dict[str, Any] = {} if is_last else {"should_stop": lambda: True}
            with suppress(Stopped):
                weights, _ = train_case(models, FULL, "full", resume_states=out / f"states.{name}", **more)
                if rank == 0:
                    save_file(weights, out / f"{name}.safetensors")

        assert exit_codes(fork_ranks(many, work), SOON_S) == [0] * many


def _kill_and_resume(models: Path, out: Path, random: Random) -> Iterator[dict[str, Any]]:
    """Kill a rank of one run after each of some steps, then let it end; yield what each start did.

    `at` is the step after which the rank is killed, `first` the step that the start began with.
    """
    for at in [*sorted(random.sample(range(1, STEPS - 1), KILLS)), None]:
        rank = random.randrange(2)
        ends = _run(models, out, "killed", rank, None if at is None else Kill(at, random.uniform(0, _STEP_S)))
        yield {"at": at, "rank": rank, "ends": ends, "first": json.loads((out / "killed.first").read_text())}


class Kill(NamedTuple):
    """The step after which a process is ended, and how many seconds after it; before the next one is over."""

    at: int
    after_s: float

    def see(self, step: int) -> None:
        """End this process by a signal, wherever it is then."""
        if step == self.at:
            signal.setitimer(signal.ITIMER_REAL, max(self.after_s, 1e-6))
        elif step > self.at:
            os.kill(os.getpid(), signal.SIGALRM)


def _run(models: Path, out: Path, name: str, to_kill: int = 0, kill: Kill | None = None) -> list[int]:
    """Start two ranks of a run, from its newest state on; return what they ended with."""
    store = next(path for i in count() if not (path := out / f"store.{name}.{i}").exists())

    def work(rank: int) -> None:
        join(store, rank, 2)
        on_step = _watch_steps(out / f"{name}.first", kill if rank == to_kill else None)
        states = out / f"states.{name}"
        weights, _ = train_case(models, ADAPTER, "full", EPOCHS, resume_states=states, on_step=on_step)
        if rank == 0:
            save_file(weights, out / f"{name}.safetensors")

    return exit_codes(fork_ranks(2, work), SOON_S)


def _watch_steps(first: Path, kill: Kill | None) -> Callable[[int, int, Any], None]:
    """Write down the first step, and see after each one whether this rank is to be killed."""
    first.unlink(missing_ok=True)

    def on_step(step: int, total: int, metrics: Any) -> None:
        assert total == STEPS
        if not first.exists():
            first.write_text(str(step))
        if kill:
            kill.see(step)

    return on_step


if __name__ == "__main__":
    main()
