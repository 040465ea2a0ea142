"""Rows of a training file: load, save, read and change their turns."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from spard.data.rows import Example, read_examples

Row = dict[str, Any]
Change = Callable[[str], str]


def chat_row(prompt: str, answer: str, system: str | None = None) -> Row:
    """Return one exchange, optionally under a system prompt, in the API's form."""
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return {"messages": [{"role": "system", "content": system}, *turns] if system else turns}


def load_rows(path: Path) -> list[Row]:
    """Return the rows of a training file; `{"prompt", "completion"}` rows become conversations."""
    return [_row(example) for example in read_examples(path)]


def save_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSON lines in UTF-8, one conversation each."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def last_request(row: Row) -> str:
    """Return the user's last message, of a chat row or of the conversation of a preference pair."""
    turns = row["messages"] if "messages" in row else row["input"]["messages"]
    return next(str(turn["content"]) for turn in reversed(turns) if turn["role"] == "user")


def last_answer(row: Row) -> str:
    """Return the assistant's last message."""
    return next(str(turn["content"]) for turn in reversed(row["messages"]) if turn["role"] == "assistant")


def change_row(row: Row, ask: Change | None = None, answer: Change | None = None) -> Row:
    """Return a copy with `ask` applied to every user turn and `answer` to every assistant turn."""
    changes = {"user": ask, "assistant": answer}
    turns = [_turn(turn, changes.get(turn["role"])) for turn in row["messages"]]
    return row | {"messages": turns}


def shuffle_rows(rows: Sequence[Row], seed: int, purpose: str) -> list[Row]:
    """Return the rows in an order determined by the seed and the purpose."""
    drawn = list(rows)
    random.Random(f"{purpose} {seed}").shuffle(drawn)
    return drawn


def _turn(turn: Row, change: Change | None) -> Row:
    return dict(turn) if change is None else turn | {"content": change(turn["content"])}


def _row(example: Example) -> Row:
    return {"messages": [dict(turn) for turn in example.messages]}
