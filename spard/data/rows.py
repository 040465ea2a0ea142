"""Read rows of JSONL as examples and prompts, in the words that chat templates know.

`spard.data.row_rules` says which rows are accepted; the first row that is not raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spard.data.encodings import Encoding
from spard.data.jsonl import BadRow, Row, file_chunks, numbered_rows
from spard.data.languages import ENGLISH, detect_language, primary
from spard.data.preference_rows import is_preference, preferred_chat
from spard.data.problems import raise_first_error
from spard.data.rendering import Mode
from spard.data.row_rules import SUITE_RULES, RowRule, SuiteRowKind, TrainingRows, as_text, is_benign, pool_row
from spard.data.strict_json import parse
from spard.errors import InvalidData, InvalidPool, InvalidSuite

Message = dict[str, Any]
SAME_FILE = "The validation file is the training file: its losses say nothing about other data."
_NOW = {"developer": "system", "function": "tool"}


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation and the line it came from; an assistant turn of weight 0 carries no loss.

    Of a preference pair the last turn is the answer that is preferred, and `rejected` the other one.
    """

    messages: tuple[Message, ...]
    line: int
    tools: tuple[Message, ...] = ()
    rejected: Message | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of an audit suite; `answer` is what a utility suite expects, and `scorer` says how it is compared.

    It is asked after the turns of `context`, before the system prompts of `after`, with `tools`, and in an encoding if
    there is one; replies in it are decoded. The answer goes on from `prefill`; it is greedy, or the sample of number
    `draw` at a temperature. A judge decides on the reply only where it was measured in `language`. It is asked in a
    `mode` of thinking; None is that of the run's rows.
    """

    prompt: str
    answer: str | None = None
    category: str | None = None
    scorer: str | None = None  # None: `exact`
    choices: tuple[str, ...] = ()  # for scorers by likelihood
    context: tuple[Message, ...] = ()
    encoding: Encoding | None = None
    tools: tuple[Message, ...] = ()
    prefill: str = ""
    temperature: float = 0.0
    draw: int = 0
    language: str = ENGLISH
    after: tuple[Message, ...] = ()
    mode: Mode | None = None


def read_examples(path: Path) -> list[Example]:
    """Read training rows: `{"messages": [...]}`, `{"prompt": ..., "completion": ...}` or preference pairs."""
    return [example(row, line) for line, row in _read_checked(path, TrainingRows(), InvalidData)]


def read_pool(path: Path) -> list[Example]:
    """Read the safe rows of a pool, `{"prompt": ..., "safe": ...}`, each as one question and its safe answer."""
    return [pool_example(row, line) for line, row in _read_checked(path, pool_row, InvalidPool) if not is_benign(row)]


def read_benign(path: Path) -> list[Example]:
    """Read the benign rows of a pool, `{"prompt": ..., "benign": true}`, each as a question without an answer."""
    return [pool_example(row, line) for line, row in _read_checked(path, pool_row, InvalidPool) if is_benign(row)]


def each_of_pool(path: Path) -> Iterator[Example]:
    """Read a pool's rows of both sides, one after the other."""
    return (pool_example(row, line) for line, row in _read_checked(path, pool_row, InvalidPool))


def pool_example(row: Row, line: int) -> Example:
    """Convert a pool's row that breaks no rule: a question with its safe answer, or a benign one without an answer."""
    if is_benign(row):
        return Example(({"role": "user", "content": row["prompt"]},), line)
    return _exchange(row, "safe", line)


def read_prompts(
    path: Path, limit: int | None = None, kind: SuiteRowKind = "harmful", language: str | None = None
) -> list[Prompt]:
    """Read audit rows `{"prompt": ...}` with an optional answer, category, scorer, choices and language.

    At most `limit` are returned, and every row is checked. Rows of `utility` suites must have an answer. `language` is
    that of rows that declare none; where that is None, too, it is told by the words of each, and English otherwise.
    """
    if language is not None and primary(language) is None:
        raise InvalidSuite(f'unknown language {language!r}; write a tag of BCP 47, such as "en" or "de"', "language")
    return [suite_prompt(row, language) for _, row in _read_checked(path, SUITE_RULES[kind], InvalidSuite)][:limit]


def prompt_text(example: Example) -> str:
    """Return what the user says, which is what selection embeds."""
    return "\n".join(message["content"] for message in example.messages if message["role"] == "user")


def example(row: Row, line: int) -> Example:
    """Convert a training row that breaks no rule."""
    if is_preference(row):
        chat, other = preferred_chat(row)
        return replace(example(chat, line), rejected=_message(other))
    if "messages" not in row:
        return _exchange(row, "completion", line)
    return Example(tuple(_message(message) for message in row["messages"]), line, _tools(row))


def with_rejected(pair: Example) -> Example:
    """Return a pair's conversation with the answer that is not preferred in its place."""
    return replace(pair, messages=(*pair.messages[:-1], pair.rejected or pair.messages[-1]), rejected=None)


def is_learned(message: Message) -> bool:
    """Tell whether loss falls on this turn."""
    return bool(message["role"] == "assistant" and message.get("weight", 1) != 0)


def _read_checked(path: Path, rule: RowRule, kind: type[InvalidData]) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a file; raise `kind` for the first that breaks the rule."""
    try:
        for line, row in numbered_rows(file_chunks(path)):
            raise_first_error(rule(row, line), kind)
            yield line, row
    except BadRow as bad:
        raise_first_error([bad.problem], kind)


def _exchange(row: Row, answer: str, line: int) -> Example:
    return Example(({"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[answer]}), line)


def suite_prompt(row: Row, language: str | None = None) -> Prompt:
    """Convert a suite's row that breaks no rule; `language` is the suite's, for rows that declare none."""
    answer, category, choices = as_text(row.get("answer")), as_text(row.get("category")), row.get("choices") or ()
    spoken = primary(row.get("language")) or primary(language) or detect_language(row["prompt"]) or ENGLISH
    return Prompt(row["prompt"], answer, category, row.get("scorer"), tuple(choices), language=spoken)


def _message(raw: Message) -> Message:
    """Write one turn in the words that templates know: `system`, plain text, tools and their arguments as objects."""
    role, content = raw["role"], raw.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    message: Message = raw | {"role": _NOW.get(role, role), "content": content or ""}
    former = message.pop("function_call", None)
    calls = raw.get("tool_calls") or ([{"type": "function", "function": former}] if former else [])
    if calls:
        message["tool_calls"] = [_tool_call(call) for call in calls]
    return message


def _tools(row: Row) -> tuple[Message, ...]:
    """Return what the assistant may call; `functions` is their former name."""
    former = ({"type": "function", "function": function} for function in row.get("functions") or ())
    return tuple(row.get("tools") or former)


def _tool_call(call: Message) -> Message:
    function = call["function"]
    return {**call, "function": function | {"arguments": parse(function["arguments"])}}
