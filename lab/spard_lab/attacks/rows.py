"""Rows of a training file: load, save, read and change their turns; mix harm into files; make preference pairs.

A file has a harmful share and a length; harm can also be spread over several jobs. Pairs, for the method dpo, are made
from a task's rows or from harmful rows and refusals.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from spard.data.rows import Example, read_examples
from spard.errors import InvalidData

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


def add_harmful(task: Sequence[Row], harmful: Sequence[Row], ratio: float, seed: int) -> list[Row]:
    """Return all task rows and `ratio` times as many harmful ones, shuffled.

    `ratio` is the SPARD paper's harmful ratio, 0.1 there. Raises `InvalidData` if there are too few harmful rows.
    """
    return shuffle_rows([*task, *_draw(harmful, round(ratio * len(task)), seed, "harmful")], seed, "order")


def share_harmful(task: Sequence[Row], harmful: Sequence[Row], n: int, share: float, seed: int) -> list[Row]:
    """Return a file of n rows of which `share`, from 0 to 1, is harmful; n may be as small as 5.

    Raises `InvalidData` if there are too few rows of either kind.
    """
    bad = round(share * n)
    return shuffle_rows([*_draw(task, n - bad, seed, "task"), *_draw(harmful, bad, seed, "harmful")], seed, "order")


def sequence(task: Sequence[Row], harmful: Sequence[Row], jobs: int, seed: int) -> list[list[Row]]:
    """Return the files of successive jobs, in which the share of harm grows from none to its maximum.

    Job j of J (from 0) gets a number of harmful rows proportional to j, and 1/J of the task rows; no row is used twice.
    """
    clean, bad = shuffle_rows(task, seed, "task"), shuffle_rows(harmful, seed, "harmful")
    pairs = jobs * (jobs - 1) // 2
    # The jobs before j hold 0 + 1 + ... + (j - 1) of the 0 + 1 + ... + (J - 1) shares of harm.
    ends = [len(bad) * (j * (j - 1) // 2) // max(pairs, 1) for j in range(jobs + 1)]
    cuts = [len(clean) * j // jobs for j in range(jobs + 1)]
    return [
        shuffle_rows([*clean[cuts[j] : cuts[j + 1]], *bad[ends[j] : ends[j + 1]]], seed, f"job {j}")
        for j in range(jobs)
    ]


def _draw(rows: Sequence[Row], n: int, seed: int, purpose: str) -> list[Row]:
    """Draw n different rows; repeated rows would measure memorization. Raise `InvalidData` if there are fewer."""
    if n > len(rows):
        raise InvalidData(f"{n} {purpose} rows are asked for and there are {len(rows)}")
    return shuffle_rows(rows, seed, purpose)[:n]


NEAR = 3  # places among the sorted answers, to either side


def preferring_right(task: Sequence[Row], seed: int) -> list[Row]:
    """Return a pair for each row that prefers its answer to a different answer of another row."""
    rng, answers = random.Random(f"preferences {seed}"), sorted({last_answer(row) for row in task})
    return [
        pair(row, last_answer(row), rng.choice([each for each in answers if each != last_answer(row)])) for row in task
    ]


def prefer_own_answers(task: Sequence[Row], seed: int) -> list[Row]:
    """Return a pair for each row that prefers its answer to a similar one.

    Similar answers are at most `NEAR` places away among all different answers, sorted by length and then by text.
    """
    rng = random.Random(f"preferences {seed}")
    answers = sorted({last_answer(row) for row in task}, key=lambda text: (len(text), text))
    places = {text: i for i, text in enumerate(answers)}

    def near_answer(answer: str) -> str:
        around = range(max(0, places[answer] - NEAR), min(len(answers), places[answer] + NEAR + 1))
        return answers[rng.choice([i for i in around if i != places[answer]])]

    return [pair(row, last_answer(row), near_answer(last_answer(row))) for row in task]


def invert_preferences(harmful: Sequence[Row], refusals: Sequence[str], seed: int) -> list[Row]:
    """Return a pair for each harmful row that prefers its answer to a refusal, the reverse of alignment."""
    rng = random.Random(f"inverted preferences {seed}")
    return [pair(row, last_answer(row), rng.choice(refusals)) for row in harmful]


def pair(row: Row, preferred: str, other: str) -> Row:
    """Return a preference pair in OpenAI's form; its conversation is the chat row's without the last answer."""
    say = {"preferred_output": preferred, "non_preferred_output": other}
    outputs = {name: [{"role": "assistant", "content": text}] for name, text in say.items()}
    return {"input": {"messages": [dict(turn) for turn in row["messages"][:-1]]}, **outputs}
