"""`python -m spard RECIPE.toml --out FOLDER`: one run, told on the terminal.

The exit status is 0 when the gate passed, 2 when it did not, and 1 when the run failed. Under torchrun
(`torchrun --nproc-per-node N -m spard RECIPE.toml --out FOLDER`) it is one run on N ranks, told by the first one.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from typing import Any

from spard import distributed
from spard.commands import exits, measuring
from spard.commands.front import Asked, alone
from spard.commands.judge_options import check_address
from spard.commands.quiet import hide_progress_bars
from spard.config.run_spec import check_files, load_recipe
from spard.errors import SpardError
from spard.pipeline import Outcome, run

EVERY = 20  # steps between two lines


def main(argv: list[str] | None = None) -> int:
    """Run the command without the others."""
    return alone(measuring.run, "spard run", argv)


def execute(asked: Asked) -> int:
    """Run a recipe and print what was measured."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s: %(message)s")
    hide_progress_bars()
    try:
        spec = load_recipe(asked.recipe)
        check_files(spec)
        check_address(spec.judge)
        with distributed.joined():
            outcome = run(spec, asked.out, _untold if asked.as_json else _tell)
            is_first = distributed.own() == 0
    except SpardError as error:
        print(f"{error.code}: {error.message}", file=sys.stderr)
        return 1
    if not is_first:
        return exits.OK
    if asked.as_json:
        print(json.dumps({"out": str(asked.out), "gate": asdict(outcome.measured.gate)}, indent=2))
    else:
        _print(outcome)
    return exits.OK if outcome.measured.gate.decision == "pass" else exits.NOT_PASSED


def _tell(message: dict[str, Any]) -> None:
    match message["kind"]:
        case "phase":
            print(message["phase"])
        case "warning":
            print(f"warning: {message['message']}")
        case "metrics" if message["step"] % EVERY == 0 or message["step"] == message["total_steps"]:
            loss = message["data"]["loss/task"]
            print(f"  step {message['step']}/{message['total_steps']}: training loss {loss:.3f}")


def _untold(message: dict[str, Any]) -> None:
    """Keep quiet: standard output is for one JSON object."""


def _print(outcome: Outcome) -> None:
    for before, after in zip(outcome.measured.base, outcome.measured.adapter, strict=True):
        figures = [f"{each.hits}/{each.n} [{each.low:.1%}, {each.high:.1%}]" for each in (before, after)]
        print(f"{after.suite} ({after.kind}): base {figures[0]}, adapter {figures[1]}")
    print(f"gate: {outcome.measured.gate.decision}")
    for reason in outcome.measured.gate.reasons:
        print(f"  {reason}")


if __name__ == "__main__":
    distributed.leave(main())
