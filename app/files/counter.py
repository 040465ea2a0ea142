"""Render and count customers' rows in a child process: `python -m app.files.counter`, started by `counting`.

It reads one question as a line of JSON from standard input and answers with a line of JSON. It has no API key and no
database connection, runs at low priority, and exits when its standard input closes.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypedDict

from app.files.tokenizer import LightTokenizer, read_tokenizer
from app.ops.processes import limit_cpu, limit_memory
from spard.data.chat import NO_LOSS, EncodedSample, encode_all
from spard.data.jsonl import Problem, parse_row
from spard.data.rows import Example, example
from spard.digests import ADDITIONAL_TEMPLATES
from spard.errors import InvalidData, ToolsNotRendered, TooManyTurns

MAX_CHARS, MAX_TURNS = 200_000, 4000
_NICE = 10
_BYTES, _CPU_S = 4 << 30, 120.0  # limits for memory and one question: templates are third-party programs
_ANY_LENGTH = 2**31
_SHOWN = 4096  # tokens of a row that a preview lists
_KEPT = 4  # tokenizers kept in memory
_HINT = "remove the row, or train a model whose chat template renders it"
_CUT_HINT = "make several rows of it, each with fewer turns"

Numbered = tuple[int, str]  # line number and text of a file's line


class Question(TypedDict):
    """A question to the process.

    `max_seq_length` is the limit that the client sent, if any, and `template_arguments` are those that the provider has
    fixed for the model's chat template, as JSON.
    """

    task: Literal["count", "show"]
    folder: str
    template_arguments: str
    max_seq_length: int | None
    lines: list[Numbered]


class Answer(TypedDict, total=False):
    """Its answer: the rows, the token limit of a row and the CPU seconds used; or only an `error`."""

    rows: list[Any]
    limit: int
    cpu_s: float
    error: str


class ShownToken(TypedDict):
    """A token as a preview shows it."""

    id: int
    text: str
    trained: bool


class ShownRow(TypedDict, total=False):
    """A row in a preview: its tokens, or why it is not rendered; of a preference pair the preferred conversation.

    If each answer is trained as a sample of its own, `tokens` are those of the last sample, and the counts cover all
    samples.
    """

    line: int
    error: str
    n_tokens: int
    n_trained: int
    tokens: list[ShownToken]
    non_preferred: ShownAnswer
    earlier_samples: list[ShownAnswer]


class ShownAnswer(TypedDict):
    """The non-preferred conversation of a preference pair, or an earlier sample of a row."""

    n_tokens: int
    n_trained: int
    tokens: list[ShownToken]


# Line number, tokens, trained tokens, and tokens of the longer conversation of a pair; or the row's problem.
Counted = tuple[int, int, int, int] | dict[str, Any]


def count(tokenizer: LightTokenizer, lines: list[Numbered]) -> list[Counted]:
    """Return the token counts of each line, or its problem; see `Counted`."""
    return [_count_tokens(line, row) for (line, _), row in zip(lines, _encode_rows(tokenizer, lines), strict=True)]


def show(tokenizer: LightTokenizer, lines: list[Numbered]) -> list[ShownRow]:
    """Return the preview of each line."""
    return [
        _row_preview(tokenizer, line, row) for (line, _), row in zip(lines, _encode_rows(tokenizer, lines), strict=True)
    ]


def _encode_rows(tokenizer: LightTokenizer, lines: list[Numbered]) -> list[EncodedSample | InvalidData]:
    """Encode all rows in one call; if a row is refused, encode them one by one."""
    rows = [_example(line, text) for line, text in lines]
    # One call is much faster than many, but it raises for the first bad row without saying which others are bad.
    good = [row for row in rows if isinstance(row, Example)]
    try:
        found = iter(encode_all(tokenizer, good, _ANY_LENGTH))
        return [next(found) if isinstance(row, Example) else row for row in rows]
    except InvalidData:
        return [_one(tokenizer, row) if isinstance(row, Example) else row for row in rows]


def _one(tokenizer: LightTokenizer, row: Example) -> EncodedSample | InvalidData:
    try:
        return encode_all(tokenizer, [row], _ANY_LENGTH)[0]
    except InvalidData as error:
        return error


def _example(line: int, text: str) -> Example | InvalidData:
    row = example(parse_row(text, line), line)
    if len(text) > MAX_CHARS or len(row.messages) > MAX_TURNS:
        message = f"line {line} has more than {MAX_CHARS} characters or {MAX_TURNS} turns: not rendered here"
        return InvalidData(message)
    return row


def _count_tokens(line: int, row: EncodedSample | InvalidData) -> Counted:
    if isinstance(row, EncodedSample):
        learned = sum(len(one.labels) - one.labels.count(NO_LOSS) for one in (*row.earlier, *row.both))
        return line, row.tokens, learned if row.is_learned else 0, row.longest
    if isinstance(row, TooManyTurns):
        return asdict(Problem(line, row.pointer, row.code, "error", row.message, _CUT_HINT))
    pointer = row.pointer if isinstance(row, ToolsNotRendered) else ""
    code = row.code if isinstance(row, ToolsNotRendered) else "template_render_failed"
    return asdict(Problem(line, pointer, code, "error", row.message, _HINT))


def _row_preview(tokenizer: LightTokenizer, line: int, row: EncodedSample | InvalidData) -> ShownRow:
    if isinstance(row, InvalidData):
        return {"line": line, "error": row.message}
    own = _answer(tokenizer, row)
    shown: ShownRow = {
        "line": line,
        "n_tokens": own["n_tokens"],
        "n_trained": own["n_trained"],
        "tokens": own["tokens"],
    }
    if row.earlier:
        shown["earlier_samples"] = [_answer(tokenizer, sample) for sample in row.earlier]
        shown["n_tokens"] = row.tokens
        shown["n_trained"] += sum(sample["n_trained"] for sample in shown["earlier_samples"])
    if row.rejected is not None:
        shown["non_preferred"] = _answer(tokenizer, row.rejected)
    return shown


def _answer(tokenizer: LightTokenizer, row: EncodedSample) -> ShownAnswer:
    """Return the tokens of one conversation, the first 4,096 of them as text."""
    pairs = list(zip(row.ids, row.labels, strict=True))
    tokens = [(token_id, tokenizer.piece(token_id), label != NO_LOSS) for token_id, label in pairs[:_SHOWN]]
    return {
        "n_tokens": len(pairs),
        "n_trained": sum(label != NO_LOSS for label in row.labels),
        "tokens": [{"id": token_id, "text": text, "trained": is_trained} for token_id, text, is_trained in tokens],
    }


@lru_cache(maxsize=_KEPT)
def _tokenizer(folder: str, template_arguments: str, version: tuple[tuple[str, int, int], ...]) -> LightTokenizer:
    return read_tokenizer(Path(folder), json.loads(template_arguments))


def _version(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return a value that changes when a file of the model's tokenizer or template changes."""
    found = sorted({*folder.glob("*.j*"), *folder.glob(f"{ADDITIONAL_TEMPLATES}/*")})
    files = [(path.name, path.stat()) for path in found if path.is_file()]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in files)


def answer(question: Question) -> Answer:
    """Answer one question with its rows and the CPU seconds that they took."""
    began = time.process_time()
    try:
        folder = question["folder"]
        tokenizer = _tokenizer(folder, question["template_arguments"], _version(Path(folder)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {"error": type(error).__name__}
    rows: list[Any] = (count if question["task"] == "count" else show)(tokenizer, question["lines"])
    limit = tokenizer.sequence_limit(question["max_seq_length"])
    return {"rows": rows, "limit": limit, "cpu_s": time.process_time() - began}


def main() -> None:
    """Answer questions from standard input, one JSON object per line in each direction, until it closes."""
    os.nice(_NICE)
    limit_memory(_BYTES)
    gc.disable()  # within a batch, collections scan all of its tokens repeatedly
    for line in sys.stdin:
        # The kernel counts the CPU time of the whole process, so the limit is moved on for each question.
        limit_cpu(_CPU_S)
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()
        gc.collect(1)


if __name__ == "__main__":
    main()
