"""Read prompts to ask both models: from a user's own file, or from the rows of a job's files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TypedDict

from app.move_in.ledger import Ledger, MoveInFailed, Record


class Prompt(TypedDict):
    """The messages and tools of a chat completion; `source` is the file and line that they come from."""

    messages: list[Record]
    tools: list[Record]
    source: str


def row_prompt(row: Record, source: str) -> Prompt | None:
    """Return a row's prompt, all messages before its last answer; None if the row has no conversation.

    A row is a chat, a preference pair (with `input`), or `{"prompt": "..."}` of a user's own list.
    """
    inside = row.get("input") if isinstance(row.get("input"), dict) else row
    messages = inside.get("messages") if isinstance(inside, dict) else None
    if messages is None and isinstance(row.get("prompt"), str) and "completion" not in row:
        messages = [{"role": "user", "content": row["prompt"]}]
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        return None
    answers = [place for place, each in enumerate(messages) if each.get("role") == "assistant"]
    asks_more = bool(messages) and messages[-1].get("role") in ("user", "tool")
    asked = messages if asks_more or not answers else messages[: answers[-1]]
    plain = [{name: value for name, value in each.items() if name != "weight"} for each in asked]
    return Prompt(messages=plain, tools=list((inside or {}).get("tools") or []), source=source) if plain else None


def prompt_id(prompt: Prompt) -> str:
    """Return a digest of a prompt's messages and tools, independent of its source."""
    text = json.dumps([prompt["messages"], prompt["tools"]], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_prompts(path: Path, name: str) -> dict[str, Prompt]:
    """Return the distinct prompts of a JSONL file by id; raise `MoveInFailed` for the first line that is no prompt."""
    found: dict[str, Prompt] = {}
    try:
        # Not `splitlines`: JSON strings may contain other line separators, such as U+2028.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise MoveInFailed(f"{path} cannot be read: {error}.") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt = _parse_prompt(line, f"{name}:{number}")
        if prompt is None:
            raise MoveInFailed(f"{name}, line {number} is no chat: nothing can be asked with it.")
        found.setdefault(prompt_id(prompt), prompt)
    return found


def sample(prompts: dict[str, Prompt], n: int) -> dict[str, Prompt]:
    """Return a deterministic sample: the n prompts whose ids have the smallest digests."""
    order = sorted(prompts, key=lambda key: hashlib.sha256(key.encode()).hexdigest())
    return {key: prompts[key] for key in order[:n]}


def of_job(ledger: Ledger, job: Record) -> dict[str, Prompt]:
    """Return the prompts of a job's validation file, on which its model was not trained, else of its training file."""
    for file_id in filter(None, (job.get("validation_file"), job.get("training_file"))):
        known = ledger.get("download", file_id) or {}
        if "sha256" in known:
            return read_prompts(ledger.folder / known["path"], file_id)
    raise MoveInFailed(f"Neither file of {job['id']} could be read; name prompts of your own with --prompts.")


def _parse_prompt(line: str, source: str) -> Prompt | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row_prompt(row, source) if isinstance(row, dict) else None
