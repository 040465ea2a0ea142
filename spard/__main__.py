"""`python -m spard RECIPE.toml --out FOLDER`: run one recipe and report on the terminal.

The exit status is 0 if the gate passed, 2 if not, and 1 if the run failed. With torchrun (`torchrun --nproc-per-node N
-m spard RECIPE.toml --out FOLDER`) it is one run on N ranks, and rank 0 reports.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from spard import distributed
from spard.commands import exits, measuring
from spard.commands.front import Asked, alone, hide_progress_bars
from spard.commands.judge_options import check_address
from spard.commands.signs import Signs
from spard.config.run_spec import check_files, load_recipe
from spard.errors import SpardError
from spard.pipeline import Outcome, run
from spard.pipeline.messages import Activity
from spard.release.task_check import TASK_REPLIES, reply_lines

_ACTIVITY = ("doing", "done", "total", "at_most")
EVERY = 20  # steps between two printed lines


def main(argv: list[str] | None = None) -> int:
    """Run this command without the other subcommands."""
    return alone(measuring.run, "spard run", argv)


def execute(asked: Asked) -> int:
    """Run a recipe and print the measurements."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s: %(message)s")
    hide_progress_bars()
    try:
        spec = load_recipe(asked.recipe)
        check_files(spec)
        check_address(spec.judge)
        with distributed.process_group():
            is_first = distributed.rank() == 0
            with Signs(print_line=None if is_first else _print_nothing) as signs:
                signs.begin(f"Reading base model and rows: {spec.public_name or spec.model}")
                outcome = run(spec, asked.out, partial(_follow, signs, Activity(), is_quiet=asked.as_json))
    except SpardError as error:
        print(f"{error.code}: {error.message}", file=sys.stderr)
        return 1
    if not is_first:
        return exits.OK
    if asked.as_json:
        print(json.dumps({"out": str(asked.out), "gate": asdict(outcome.measured.gate)}, indent=2))
    else:
        _print(outcome)
        _print_task(outcome, asked.out / TASK_REPLIES)
    return exits.OK if outcome.measured.gate.decision == "pass" else exits.NOT_PASSED


def _follow(signs: Signs, activity: Activity, message: dict[str, Any], *, is_quiet: bool) -> None:
    """Print a message of the run; with `is_quiet`, standard output stays free for one JSON object."""
    line = _line(message)
    if line is not None and not is_quiet:
        print(line, flush=True)
    match message["kind"]:
        case "phase":
            activity.end()
            signs.begin(message["phase"], is_printed=is_quiet)
        case "activity":
            signs.detail(activity.describe(**{name: message[name] for name in _ACTIVITY}))
        case "progress" if not activity.is_known:
            signs.detail(f"{message['done']:,} of {message['total']:,} done")
        case "metrics":
            activity.end()
            signs.detail(f"step {message['step']}/{message['total_steps']}")
        case "event":
            signs.note(f"  {message['message']}")
        case _ if line is not None:
            signs.note(line, is_printed=False)


def _line(message: dict[str, Any]) -> str | None:
    match message["kind"]:
        case "phase":
            return str(message["phase"])
        case "warning":
            return f"warning: {message['message']}"
        case "metrics" if message["step"] % EVERY == 0 or message["step"] == message["total_steps"]:
            return (
                f"  step {message['step']}/{message['total_steps']}: training loss {message['data']['loss/task']:.3f}"
            )
    return None


def _print_nothing(line: str) -> None:
    """Print nothing: rank 0 prints."""


def _print(outcome: Outcome) -> None:
    for before, after in zip(outcome.measured.base, outcome.measured.adapter, strict=True):
        figures = [f"{each.hits}/{each.n} [{each.low:.1%}, {each.high:.1%}]" for each in (before, after)]
        print(f"{after.suite} ({after.kind}): base {figures[0]}, adapter {figures[1]}")
    print(f"gate: {outcome.measured.gate.decision}")
    for reason in outcome.measured.gate.reasons:
        print(f"  {reason}")


def _print_task(outcome: Outcome, replies: Path) -> None:
    """Print whether the task was learned, and what both models reply to some of its rows."""
    if words := outcome.report.task:
        print(f"task: {' '.join(filter(None, (words.headline, words.figures, words.note)))}")
    else:
        print("task: it was not looked at whether it was learned; `held_out_rows = 100` in the recipe looks at it")
    if replies.exists():
        for line in replies.read_text().splitlines():
            print("\n".join(f"  {each}" for each in reply_lines(json.loads(line))))


if __name__ == "__main__":
    distributed.leave(main())
