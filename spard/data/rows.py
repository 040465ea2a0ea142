"""Rows as examples and prompts, in the vocabulary of chat templates: read from JSONL, and taken apart into turns.

`spard.data.row_rules` defines the valid rows; the first invalid row raises. A job asks the same question about the same
rows several times, so functions of all rows can keep their last result (`keep_last`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from spard.data.chat_rows import is_preference, preferred_chat
from spard.data.encodings import Encoding
from spard.data.jsonl import BadRow, Row, file_chunks, numbered_rows, parse_json, raise_first_error
from spard.data.languages import ENGLISH, detect_language, primary
from spard.data.rendering import Mode
from spard.data.row_rules import SUITE_RULES, RowRule, SuiteRowKind, TrainingRows, as_text, is_benign, pool_row
from spard.errors import InvalidData, InvalidPool, InvalidSuite

Message = dict[str, Any]
SAME_FILE = "The validation file is the training file: its losses say nothing about other data."
_NOW = {"developer": "system", "function": "tool"}


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation and its line (from 1); an assistant turn of weight 0 has no loss.

    For a preference pair the last turn is the preferred answer, and `rejected` the other one.
    """

    messages: tuple[Message, ...]
    line: int
    tools: tuple[Message, ...] = ()
    rejected: Message | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of an audit suite; `answer` is the expected one in a utility suite, compared by `scorer`.

    The request follows the turns of `context` and precedes the system prompts of `after`; it comes with `tools`, and in
    an `encoding` if given, in which case replies are decoded. The reply continues `prefill`; it is greedy, or sample
    number `draw` at `temperature`. A judge decides on the reply only if it was measured in `language`. `mode` is the
    thinking mode; None: the mode of the run's rows.
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
    """Read training rows: `{"messages": [...]}`, `{"prompt": ..., "completion": ...}` or preference pairs.

    Raises `InvalidData` for the first invalid row.
    """
    return [example(row, line) for line, row in _read_checked(path, TrainingRows(), InvalidData)]


def read_pool(path: Path) -> list[Example]:
    """Read the safe rows of a pool, `{"prompt": ..., "safe": ...}`, each as a question with its safe answer."""
    return [pool_example(row, line) for line, row in _read_checked(path, pool_row, InvalidPool) if not is_benign(row)]


def read_benign(path: Path) -> list[Example]:
    """Read the benign rows of a pool, `{"prompt": ..., "benign": true}`, each as a question without an answer."""
    return [pool_example(row, line) for line, row in _read_checked(path, pool_row, InvalidPool) if is_benign(row)]


def each_of_pool(path: Path) -> Iterator[Example]:
    """Yield all rows of a pool, safe and benign, in file order."""
    return (pool_example(row, line) for line, row in _read_checked(path, pool_row, InvalidPool))


def pool_example(row: Row, line: int) -> Example:
    """Convert a valid pool row: a question with its safe answer, or a benign question without an answer."""
    if is_benign(row):
        return Example(({"role": "user", "content": row["prompt"]},), line)
    return _exchange(row, "safe", line)


def read_prompts(
    path: Path, limit: int | None = None, kind: SuiteRowKind = "harmful", language: str | None = None
) -> list[Prompt]:
    """Read audit rows `{"prompt": ...}` with an optional answer, category, scorer, choices and language.

    Returns at most `limit` prompts but checks every row; rows of `utility` suites need an answer. `language` applies to
    rows that declare none; if it is None the language of each row is detected, with English as the fallback. Raises
    `InvalidSuite`.
    """
    if language is not None and primary(language) is None:
        raise InvalidSuite(f'unknown language {language!r}; write a tag of BCP 47, such as "en" or "de"', "language")
    return [suite_prompt(row, language) for _, row in _read_checked(path, SUITE_RULES[kind], InvalidSuite)][:limit]


def prompt_text(example: Example) -> str:
    """Return the user turns of a row, which selection embeds."""
    return "\n".join(message["content"] for message in example.messages if message["role"] == "user")


def example(row: Row, line: int) -> Example:
    """Convert a valid training row."""
    if is_preference(row):
        chat, other = preferred_chat(row)
        return replace(example(chat, line), rejected=_message(other))
    if "messages" not in row:
        return _exchange(row, "completion", line)
    return Example(tuple(_message(message) for message in row["messages"]), line, _tools(row))


def with_rejected(pair: Example) -> Example:
    """Return a pair's conversation with its non-preferred answer as the last turn."""
    return replace(pair, messages=(*pair.messages[:-1], pair.rejected or pair.messages[-1]), rejected=None)


def is_learned(message: Message) -> bool:
    """Return True if this turn has a loss."""
    return bool(message["role"] == "assistant" and message.get("weight", 1) != 0)


def _read_checked(path: Path, rule: RowRule, kind: type[InvalidData]) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a file; raise `kind` for the first row that breaks the rule."""
    try:
        for line, row in numbered_rows(file_chunks(path)):
            raise_first_error(rule(row, line), kind)
            yield line, row
    except BadRow as bad:
        raise_first_error([bad.problem], kind)


def _exchange(row: Row, answer: str, line: int) -> Example:
    return Example(({"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[answer]}), line)


def suite_prompt(row: Row, language: str | None = None) -> Prompt:
    """Convert a valid suite row; `language` is the suite's, for rows that declare none."""
    answer, category, choices = as_text(row.get("answer")), as_text(row.get("category")), row.get("choices") or ()
    spoken = primary(row.get("language")) or primary(language) or detect_language(row["prompt"]) or ENGLISH
    return Prompt(row["prompt"], answer, category, row.get("scorer"), tuple(choices), language=spoken)


def _message(raw: Message) -> Message:
    """Return one turn in the templates' vocabulary: `system` for developer, plain text, parsed tool arguments."""
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
    """Return the tools of a row; `functions` is their former name."""
    former = ({"type": "function", "function": function} for function in row.get("functions") or ())
    return tuple(row.get("tools") or former)


def _tool_call(call: Message) -> Message:
    function = call["function"]
    # OpenAI has arguments as a JSON string, chat templates expect an object.
    return {**call, "function": function | {"arguments": parse_json(function["arguments"])}}


def last_request(row: Example) -> str:
    """Return the last request; empty if there is none."""
    return next((str(turn["content"]) for turn in reversed(row.messages) if turn["role"] == "user"), "")


def last_answer(row: Example) -> str:
    """Return the last answer, preceded by its reasoning if there is any; empty if there is none."""
    last = next((turn for turn in reversed(row.messages) if turn["role"] == "assistant"), {"content": ""})
    return "\n\n".join(str(part) for part in (last.get("reasoning_content"), last["content"]) if part)


def up_to_answers(row: Example) -> Iterator[Example]:
    """Yield the row truncated after each learned answer, and finally the whole row."""
    ends = [i for i, turn in enumerate(row.messages, start=1) if is_learned(turn) and turn["content"]]
    yield from (replace(row, messages=row.messages[:end]) for end in ends[:-1])
    yield row


def system_prompt(row: Example) -> tuple[Message, ...]:
    """Return the system prompt, wherever it is; several are merged, since most templates reject a second one."""
    return _as_one(row.messages)


def leading_system(row: Example) -> tuple[Message, ...]:
    """Return the system prompt before the last request; several are merged."""
    return _as_one(row.messages[: max(0, _last_request(row))])


def trailing_system(row: Example) -> tuple[Message, ...]:
    """Return the system prompts between the last request and its answer."""
    return tuple(turn for turn in row.messages[_last_request(row) + 1 :] if turn["role"] == "system")


def has_earlier_turns(row: Example) -> bool:
    """Return True if there is a user turn before the last request."""
    return [turn["role"] for turn in row.messages].count("user") > 1


def earlier_turns(row: Example) -> tuple[Message, ...]:
    """Return all turns before the last request, including a system prompt, with weight 0 on the answers."""
    before = row.messages[: max(0, _last_request(row))]
    # These turns are context for another request and must not be learned again.
    return tuple(turn | {"weight": 0} if turn["role"] == "assistant" else turn for turn in before)


def _as_one(turns: Iterable[Message]) -> tuple[Message, ...]:
    found = tuple(turn for turn in turns if turn["role"] == "system")
    whole = "\n\n".join(str(turn["content"]) for turn in found)
    return ({"role": "system", "content": whole},) if len(found) > 1 else found


def _last_request(row: Example) -> int:
    return max((i for i, turn in enumerate(row.messages) if turn["role"] == "user"), default=-1)


Found = TypeVar("Found")
More = ParamSpec("More")


def keep_last(
    find: Callable[Concatenate[Sequence[Example], More], Found],
) -> Callable[Concatenate[Sequence[Example], More], Found]:
    """Cache a function's last result for as long as it is called with the same rows and arguments.

    Rows are the same if they are identical objects in the same order. The result is shared and must be immutable.
    """
    last: tuple[list[Example], object, Found] | None = None

    @wraps(find)
    def remember(rows: Sequence[Example], /, *args: More.args, **kwargs: More.kwargs) -> Found:
        nonlocal last
        kept, more = last, (args, kwargs)
        if (
            kept is None
            or kept[1] != more
            or len(kept[0]) != len(rows)
            or any(a is not b for a, b in zip(kept[0], rows, strict=True))
        ):
            last = kept = list(rows), more, find(rows, *args, **kwargs)
        return kept[2]

    return remember
