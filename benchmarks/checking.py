"""Measure how many rows of a training file are validated per second, optionally compared with another checkout.

    python -m benchmarks.checking [--rows 100000] [--beside FOLDER] [--rounds 5]

Three files are validated in memory, without a service: rows of two turns, rows with tools and calls, and rows as
`datasets` writes them, with every key in every message. With `--beside` each round runs both checkouts one after the
other, so other load on the machine affects both. The result is the least CPU time of all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from app.files.validation import Limits, Validator
from spard.data.row_rules import TrainingRows

HERE = Path(__file__).resolve().parents[1]
_CHUNK = 1 << 16
_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
_NUMBERS = {name: {"type": "number", "description": "A number to add."} for name in ("a", "b")}
_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": _NUMBERS}}}
_KEYS = ("role", "content", "name", "weight", "tool_calls", "tool_call_id")


def main() -> None:
    """Print the rows per second for each file, and with `--beside` those of the other checkout and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--beside", type=Path, help="a folder with another checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--once", action="store_true", help="only print the seconds, as JSON")
    asked = parser.parse_args()
    if asked.once:
        print(json.dumps(measure(asked.rows)))
        return
    folders = [HERE, *([asked.beside.resolve()] if asked.beside else [])]
    least: dict[Path, dict[str, float]] = {}
    for _ in range(asked.rounds):
        for folder in folders:
            seconds = _run(folder, asked.rows)
            least[folder] = {name: min(taken, least.get(folder, seconds)[name]) for name, taken in seconds.items()}
    print(f"{asked.rows} rows, least of {asked.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for name, taken in least[HERE].items():
        other = [f"; beside {asked.rows / least[each][name]:,.0f} rows/s" for each in folders[1:]]
        ratio = [f", {least[each][name] / taken:.2f} times that" for each in folders[1:]]
        print(f"{name}: {asked.rows / taken:,.0f} rows/s{''.join(other + ratio)}")


def _run(folder: Path, rows: int) -> dict[str, float]:
    """Run this file on a checkout in a new process, so both get the same rows; return CPU seconds by file."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-P", __file__, "--once", "--rows", str(rows)]
    done = subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True, text=True)
    seconds: dict[str, float] = json.loads(done.stdout)
    return seconds


def measure(rows: int) -> dict[str, float]:
    """Return the CPU seconds that validating each file takes, whether its rows are accepted or refused."""
    return {name: _seconds(content) for name, content in _files(rows).items()}


def _seconds(content: bytes) -> float:
    validator = Validator(TrainingRows(), Limits(1 << 40, 1 << 20, 1 << 40))
    began = time.process_time()
    for start in range(0, len(content), _CHUNK):
        validator.feed(content[start : start + _CHUNK])
    validator.finish()
    return time.process_time() - began


def _files(rows: int) -> dict[str, bytes]:
    return {
        "two turns": b"".join(_line({"messages": _turns(i)}) for i in range(rows)),
        "tools and calls": b"".join(_line({"messages": _turns(i, calls=True), "tools": [_TOOL]}) for i in range(rows)),
        "written by datasets": b"".join(
            _line({"messages": [{key: turn.get(key) for key in _KEYS} for turn in _turns(i)], "tools": None})
            for i in range(rows)
        ),
    }


def _turns(i: int, *, calls: bool = False) -> list[dict[str, Any]]:
    asked = {"role": "user", "content": f"What is {i} and {i}? Please explain how you have found it, in one sentence."}
    said = {"role": "assistant", "content": f"It is {2 * i}, since twice a number is the number added to itself."}
    called: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]
    return [asked, *(called if calls else []), said]


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


if __name__ == "__main__":
    main()
