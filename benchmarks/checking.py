"""Measure how many rows of a training file are validated and counted per second, also beside another checkout.

    python -m benchmarks.checking [--rows 100000] [--beside FOLDER] [--rounds 5]

Three files are validated in memory, without a service: rows of two turns, rows with tools and calls, and rows as
`datasets` writes them, with every key in every message. The rows of two turns are also rendered and counted as for
`validation?model=`, with Qwen2.5's chat template and a tokenizer that is trained on them. So are single rows of 400 and
of 1,600 turns, which tell how the time grows with the turns. With `--beside` each round runs both checkouts one after
the other, so other load on the machine affects both. The result is the least CPU time of all rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from app.files import counter
from app.files.validation import Limits, Validator
from spard.data.row_rules import TrainingRows

HERE = Path(__file__).resolve().parents[1]
_CHUNK = 1 << 16
_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
_NUMBERS = {name: {"type": "number", "description": "A number to add."} for name in ("a", "b")}
_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": _NUMBERS}}}
_LONG = {"400 turns, counted": 400, "1,600 turns, counted": 1600}
_LONG_ROWS = 4  # counted of each of these
_BATCH = 256  # rows of one question to the counting process
_KEYS = ("role", "content", "name", "weight", "tool_calls", "tool_call_id")


def main() -> None:
    """Print the rows per second for each file, and with `--beside` those of the other checkout and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--beside", type=Path, help="a folder with another checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--once", type=Path, help="only print the seconds, as JSON, with the tokenizer in this folder")
    asked = parser.parse_args()
    if asked.once:
        print(json.dumps(measure(asked.rows, asked.once)))
        return
    with TemporaryDirectory() as place:
        _write_tokenizer(Path(place))
        _compare(asked, Path(place))


def _compare(asked: argparse.Namespace, tokenizer: Path) -> None:
    folders = [HERE, *([asked.beside.resolve()] if asked.beside else [])]
    least: dict[Path, dict[str, float]] = {}
    for _ in range(asked.rounds):
        for folder in folders:
            seconds = _run(folder, asked.rows, tokenizer)
            least[folder] = {name: min(taken, least.get(folder, seconds)[name]) for name, taken in seconds.items()}
    print(f"{asked.rows} rows, least of {asked.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for name, taken in least[HERE].items():
        rows = _LONG_ROWS if name in _LONG else asked.rows
        other = [f"; beside {rows / least[each][name]:,.1f} rows/s" for each in folders[1:]]
        ratio = [f", {least[each][name] / taken:.2f} times that" for each in folders[1:]]
        print(f"{name}: {rows / taken:,.1f} rows/s{''.join(other + ratio)}")
    short, long = _LONG
    growth = [f"{least[each][long] / least[each][short]:.1f}" for each in folders]
    print(f"a row of 1,600 turns takes so many times as long as one of 400: {'; beside '.join(growth)}")


def _run(folder: Path, rows: int, tokenizer: Path) -> dict[str, float]:
    """Run this file on a checkout in a new process, so both get the same rows; return CPU seconds by file."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-P", __file__, "--once", str(tokenizer), "--rows", str(rows)]
    done = subprocess.run(command, env=environment, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    seconds: dict[str, float] = json.loads(done.stdout)
    return seconds


def measure(rows: int, tokenizer: Path) -> dict[str, float]:
    """Return the CPU seconds of validating each file, whether its rows are taken or refused, and of counting rows."""
    files = _files(rows)
    found = {name: _seconds(content) for name, content in files.items()}
    counter.MAX_TURNS = max(_LONG.values())  # earlier versions counted no rows of more than 100 turns
    found["two turns, counted"] = _counting_seconds(files["two turns"].decode().splitlines(), tokenizer)
    for name, turns in _LONG.items():
        row = json.dumps({"messages": [turn for i in range(turns // 2) for turn in _short_turns(i % 100)]})
        found[name] = _counting_seconds([row] * _LONG_ROWS, tokenizer)
    return found


def _counting_seconds(rows: list[str], tokenizer: Path) -> float:
    """Return the CPU seconds of counting rows, in batches as the service does; raise `ValueError` if one is refused."""
    question: Any = {"task": "count", "folder": str(tokenizer), "template_arguments": "{}", "max_seq_length": None}
    counter.answer(question | {"lines": [(1, rows[0])]})  # reads the tokenizer and compiles the template
    gc.disable()  # as in the counting process
    began = time.process_time()
    for start in range(0, len(rows), _BATCH):
        found = counter.answer(question | {"lines": list(enumerate(rows[start : start + _BATCH], start=start + 1))})
        if "error" in found or any(isinstance(row, dict) for row in found["rows"]):
            raise ValueError("a row was refused")
        gc.collect(1)
    return time.process_time() - began


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of 2,000 tokens, trained on the rows, with Qwen2.5's chat template."""
    from tools.chat_templates import trl_templates  # other checkouts, on which this file runs too, may not have it

    tokens = Tokenizer(BPE())
    tokens.pre_tokenizer = ByteLevel(add_prefix_space=False)
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = BpeTrainer(
        vocab_size=2000, show_progress=False, special_tokens=special, initial_alphabet=ByteLevel.alphabet()
    )
    tokens.train_from_iterator((turn["content"] for i in range(2000) for turn in _turns(i)), trainer)
    tokens.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": trl_templates()["qwen2_5"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


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


def _short_turns(i: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"And {i}?"}, {"role": "assistant", "content": f"It is {2 * i}."}]


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


if __name__ == "__main__":
    main()
