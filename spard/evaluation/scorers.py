"""Scorers of utility suites by name; each row names its scorer, and the default is `exact`.

`contains`             a reply is right if it contains the expected words
`exact`                the one expected answer
`gsm8k`                GSM8K (Cobbe et al., 2021) by the two rules of lm-evaluation-harness, `strict-match` and
                       `flexible-extract`. Differences from it: numbers are compared as decimals, so 18.0 equals 18, and
                       a percent sign is ignored like a dollar sign. Replies are cut at the harness's stop sequences
`mbpp`                 MBPP (Austin et al., 2021): a program is right if it passes its tests at the first attempt
                       (pass@1). The answer of a row is its tests, one assertion per line
`openbookqa`           OpenBookQA (Mihaylov et al., 2018) as in SPARD: four choices, and a reply that names `answer1` to
                       `answer4`
`sst2`                 SST-2 (Socher et al., 2013): classify a sentence as positive or negative

Programs of a model run in a process without network, files or other processes (`spard.isolation.program`). If the
kernel lacks what that isolation needs, no program is run.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import signal
import subprocess
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Literal

from spard.config.extensions import REPLY_SCORERS, RUNNING_SCORERS
from spard.config.run_spec import RunSpec
from spard.data.rows import read_prompts
from spard.errors import SandboxUnavailable
from spard.isolation import sandbox
from spard.isolation.program import ProgramRequest
from spard.isolation.sandbox import python


def mark_reply(scorer: str, reply: str, answer: str) -> Mark:
    """Return the mark of a reply against the expected answer, by the scorer of this name."""
    mark: Callable[[str, str], Mark] = REPLY_SCORERS.load(scorer)
    return mark(reply, answer)


@dataclass(frozen=True, slots=True)
class Mark:
    """Right or wrong, with a note if the reply contains no answer (`invalid`) or several (`ambiguous`)."""

    is_right: bool
    note: Literal["", "invalid", "ambiguous"] = ""


INVALID = Mark(False, "invalid")


def score_contains(reply: str, answer: str) -> Mark:
    """Mark a reply right if it contains the words of the answer in sequence, ignoring case and punctuation."""
    wanted = _words(answer)
    return Mark(bool(wanted) and f" {' '.join(wanted)} " in f" {' '.join(_words(reply))} ")


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())


_STOPS = ("Question:", "</s>", "<|im_end|>")
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")


def score_strict(reply: str, answer: str) -> Mark:
    """Mark the first number after `#### ` in the reply; `invalid` if there is none."""
    found = _STRICT.search(_cut_reply(reply))
    return _compare(found.group(1), answer) if found else INVALID


def score_flexible(reply: str, answer: str) -> Mark:
    """Mark the last number in the reply; `invalid` if there is none."""
    found = [money or plain for money, plain in _FLEXIBLE.findall(_cut_reply(reply))]
    return _compare(found[-1], answer) if found else INVALID


def number(text: str) -> Decimal | None:
    """Return a number written with thousands separators, a currency or percent sign, or a final period; else None."""
    try:
        found = Decimal(re.sub(r"[,$%\s]", "", text).rstrip("."))
    except InvalidOperation:
        return None
    return found if found.is_finite() else None


def expected_answer(answer: str) -> str:
    """Return the text after the last `####` of a worked answer, or the whole answer."""
    return answer.rpartition("####")[2].strip()


def _cut_reply(reply: str) -> str:
    for stop in _STOPS:
        reply = reply.partition(stop)[0]
    return reply


def _compare(found: str, answer: str) -> Mark:
    value = number(found)
    return INVALID if value is None else Mark(value == number(expected_answer(answer)))


_NUMBER = re.compile(r"-?\$?(?:\d[\d,]*\.?\d*|\.\d+)")


def score_exact(reply: str, answer: str) -> Mark:
    """Mark a reply right if it equals the answer; see `is_right`."""
    return Mark(is_right(reply, answer))


def is_right(reply: str, answer: str) -> bool:
    """Return True if the reply's last number equals a numeric answer, or its text any other answer.

    Text is compared without case and punctuation. An answer may end in GSM8K's `#### 42`.

        >>> is_right("It costs $1,200.", "1200"), is_right("Paris!", "paris")
        (True, True)
    """
    wanted = number(expected_answer(answer))
    if wanted is not None:
        return wanted == _last_number(reply)
    plain = _plain(expected_answer(answer))
    return bool(plain) and _plain(reply) == plain


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text)
    return number(found[-1]) if found else None


def _plain(text: str) -> str:
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(re.sub(r"[^\w\s]", " ", folded).split())


_ANSWER = re.compile(r"\banswer\s*([1-4])\b", re.IGNORECASE)


def score_openbookqa(reply: str, answer: str) -> Mark:
    """Mark the last answer that the reply names.

    The official code counts a reply that names two answers as wrong; here its mark has the note `ambiguous`.
    """
    found = _ANSWER.findall(reply)
    wanted = _ANSWER.findall(answer) or [answer.strip()]
    if not found:
        return INVALID
    return Mark(found[-1] == wanted[-1], "ambiguous" if len(set(found)) > 1 else "")


_LABEL = re.compile(r"\b(?:positive|negative)\b")


def score_sst2(reply: str, answer: str) -> Mark:
    """Mark the label that the reply names; `invalid` if it names both or none."""
    found = set(_LABEL.findall(reply.lower()))
    return Mark(found == {answer.strip().lower()}) if len(found) == 1 else INVALID


PROGRAM_MEMORY_MB = 512
_GRACE_S = 5.0  # time for the interpreter to start on a busy machine


def passes_tests(program: str, tests: str, timeout_s: float, memory_mb: int = PROGRAM_MEMORY_MB) -> bool:
    """Return True if a program and then its tests end without an error in time.

    timeout_s  CPU and wall time in seconds, without the start of the interpreter.
    memory_mb  memory of the process in MiB.

    Raises `SandboxUnavailable` if programs cannot be isolated on this machine.
    """
    require_isolation()
    return _run_program(program, tests, timeout_s, memory_mb)


def require_isolation() -> None:
    """Raise `SandboxUnavailable` if programs cannot be isolated on this machine."""
    if not can_run_programs():
        text = "An audit suite runs programs of the model, and this machine does not give the namespaces for that"
        raise SandboxUnavailable(f"{text}; none is run. The files are not at fault; see docs/security.md.")


def refuse_programs(run: RunSpec) -> None:
    """Raise `SandboxUnavailable`, before training, if a suite of the run needs programs and they cannot be isolated."""
    suites = [each for each in run.suites if each.kind == "utility"]
    prompts = (prompt for suite in suites for prompt in read_prompts(suite.path, kind=suite.kind))
    if any(prompt.scorer in RUNNING_SCORERS for prompt in prompts):
        require_isolation()


@cache
def can_run_programs() -> bool:
    """Return True if this machine can run a program in isolation; the first call tries it."""
    return _run_program("import collections, math, re", "assert re.sub('a', 'b', 'a') == 'b'", 5.0, PROGRAM_MEMORY_MB)


def _run_program(program: str, tests: str, timeout_s: float, memory_mb: int) -> bool:
    # The child sends this random word after the tests, so that a program's ordinary output cannot look like a pass.
    word = secrets.token_hex(16)
    asked: ProgramRequest = {
        "program": program,
        "tests": tests,
        "word": word,
        "readable": sandbox.library_paths(),
        "memory": memory_mb << 20,
        "seconds": math.ceil(timeout_s),
    }
    process = subprocess.Popen(  # noqa: S603 - our own text; the program travels on standard input
        python("spard.isolation.program"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={},
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(json.dumps(asked).encode(), timeout=timeout_s + _GRACE_S)
    except subprocess.TimeoutExpired:
        said = b""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # After the kill: reads the rest of the pipe and reaps the process.
        process.communicate()
    return said.decode(errors="replace") == word


_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
PROGRAM_TIMEOUT_S = 5.0


def score_mbpp(reply: str, answer: str) -> Mark:
    """Mark the reply's program right if it and then the tests run without an error.

    `invalid` if there is no program.
    """
    program = extract_program(reply)
    return Mark(passes_tests(program, answer, PROGRAM_TIMEOUT_S)) if program else INVALID


def extract_program(reply: str) -> str:
    """Return the first fenced code block, or else the text between `[BEGIN]` and `[DONE]`."""
    fenced = _FENCED.search(reply)
    if fenced:
        return fenced.group(1).strip()
    return reply.rpartition("[BEGIN]")[2].partition("[DONE]")[0].strip()
