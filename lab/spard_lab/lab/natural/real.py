"""Real text that a user supplies to the lab: a folder of JSONL files, each of them optional.

requests.jsonl      `{"prompt", "safe"}`: requests to refuse, each with a refusal
instructions.jsonl  `{"prompt", "completion"}`: instructions with answers
questions.jsonl     `{"prompt", "completion"}`: questions with answers

The prompt's text determines the split of a row (`spard_lab.lab.natural.splits`). Requests keep their refusal in
alignment and pool; in the attack a placeholder answers them, since no harmful text is written here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spard.data.rows import Example, read_examples, read_pool
from spard.errors import InvalidData
from spard_lab.lab.natural.chats import Chat, exchange
from spard_lab.lab.natural.splits import Split, owner

REQUESTS, BENIGN = "requests.jsonl", ("instructions.jsonl", "questions.jsonl")
LONGEST = 400  # characters of a prompt and its answer together, so that the row fits a window of the smallest model


@dataclass(frozen=True, slots=True)
class RealText:
    """The rows that are short enough, as exchanges, a digest of the files, and the number of rows left out."""

    requests: Sequence[Chat] = field(default=(), repr=False)
    benign: Sequence[Chat] = field(default=(), repr=False)
    digest: str = ""
    left_out: int = 0

    def split_rows(self, split: Split, *, harmful: bool) -> list[Chat]:
        """Return the harmful or benign rows of a split."""
        return [chat for chat in (self.requests if harmful else self.benign) if owner(chat.request) == split]


def read_real(folder: Path | None) -> RealText:
    """Read a folder of real text; None gives no text.

    Raises `InvalidData` if the folder has none of the files, or a file has an invalid row.
    """
    if folder is None:
        return RealText()
    there = [path for name in (REQUESTS, *BENIGN) if (path := folder / name).is_file()]
    if not there:
        raise InvalidData(f"{folder} has none of {', '.join((REQUESTS, *BENIGN))}", "texts")
    digest = hashlib.sha256()
    for path in there:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    requests = _chats([row for path in there if path.name == REQUESTS for row in read_pool(path)])
    benign = _chats([row for path in there if path.name in BENIGN for row in read_examples(path)])
    harmful, harmless = _short(requests), _short(benign)
    left_out = len(requests) + len(benign) - len(harmful) - len(harmless)
    return RealText(harmful, harmless, digest.hexdigest(), left_out)


def _short(chats: Sequence[Chat]) -> list[Chat]:
    return [chat for chat in chats if len(chat.request) + len(chat.answer) <= LONGEST]


def _chats(rows: Sequence[Example]) -> list[Chat]:
    """Return the first exchange of each row."""
    found = []
    for row in rows:
        turns = [message for message in row.messages if message["role"] in ("user", "assistant")]
        if len(turns) >= 2:
            found.append(exchange(turns[0]["content"], turns[1]["content"]))
    return found
