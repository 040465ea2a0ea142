"""MBPP (Austin et al., 2021): a program is right if it passes its tests at the first attempt (pass@1).

The answer of a row is its tests, one assertion per line. Programs of a model run in a process without network, files or
other processes (`spard.isolation.program`). If the kernel lacks what that isolation needs, no program is run.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import signal
import subprocess
from contextlib import suppress
from functools import cache

from spard.config.extensions import RUNNING_SCORERS
from spard.config.run_spec import RunSpec
from spard.data.rows import read_prompts
from spard.errors import SandboxUnavailable
from spard.evaluation.scorers.replies import INVALID, Mark
from spard.isolation import reach
from spard.isolation.program import Asked
from spard.isolation.walls import python

MEMORY_MB = 512
_GRACE_S = 5.0  # time for the interpreter to start on a busy machine


def passes(program: str, tests: str, timeout_s: float, memory_mb: int = MEMORY_MB) -> bool:
    """Return True if a program and then its tests end without an error in time.

    timeout_s  CPU and wall time in seconds, without the start of the interpreter.
    memory_mb  memory of the process in MiB.

    Raises `SandboxUnavailable` if programs cannot be isolated on this machine.
    """
    require()
    return _run(program, tests, timeout_s, memory_mb)


def require() -> None:
    """Raise `SandboxUnavailable` if programs cannot be isolated on this machine."""
    if not is_available():
        text = "An audit suite runs programs of the model, and this machine does not give the namespaces for that"
        raise SandboxUnavailable(f"{text}; none is run. The files are not at fault; see docs/security.md.")


def refuse_programs(run: RunSpec) -> None:
    """Raise `SandboxUnavailable`, before training, if a suite of the run needs programs and they cannot be isolated."""
    suites = [each for each in run.suites if each.kind == "utility"]
    prompts = (prompt for suite in suites for prompt in read_prompts(suite.path, kind=suite.kind))
    if any(prompt.scorer in RUNNING_SCORERS for prompt in prompts):
        require()


@cache
def is_available() -> bool:
    """Return True if this machine can run a program in isolation; the first call tries it."""
    return _run("import collections, math, re", "assert re.sub('a', 'b', 'a') == 'b'", 5.0, MEMORY_MB)


def _run(program: str, tests: str, timeout_s: float, memory_mb: int) -> bool:
    # The child sends this random word after the tests, so that a program's ordinary output cannot look like a pass.
    word = secrets.token_hex(16)
    asked: Asked = {
        "program": program,
        "tests": tests,
        "word": word,
        "readable": reach.standard_library(),
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
TIMEOUT_S = 5.0


def score_mbpp(reply: str, answer: str) -> Mark:
    """Mark the reply's program right if it and then the tests run without an error.

    `invalid` if there is no program.
    """
    program = extract_program(reply)
    return Mark(passes(program, answer, TIMEOUT_S)) if program else INVALID


def extract_program(reply: str) -> str:
    """Return the first fenced code block, or else the text between `[BEGIN]` and `[DONE]`."""
    fenced = _FENCED.search(reply)
    if fenced:
        return fenced.group(1).strip()
    return reply.rpartition("[BEGIN]")[2].partition("[DONE]")[0].strip()
