"""Model-written Python, run in a process that may compute and little else (see `spard.isolation.program`).

Where the kernel does not give what that process needs, nothing is run.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import subprocess
from contextlib import suppress
from functools import cache

from spard.config.extensions import RUNNING_SCORERS
from spard.config.run_spec import RunSpec
from spard.data.rows import read_prompts
from spard.errors import SandboxUnavailable
from spard.isolation import reach
from spard.isolation.program import Asked
from spard.isolation.walls import python

MEMORY_MB = 512
_GRACE_S = 5.0  # for the interpreter to start on a busy machine


def passes(program: str, tests: str, timeout_s: float, memory_mb: int = MEMORY_MB) -> bool:
    """Whether a program and then its tests run to their end in time."""
    require()
    return _run(program, tests, timeout_s, memory_mb)


def require() -> None:
    """Raise `SandboxUnavailable` where no program can be run."""
    if not is_available():
        text = "An audit suite runs programs of the model, and this machine does not give the namespaces for that"
        raise SandboxUnavailable(f"{text}; none is run. The files are not at fault; see docs/security.md.")


def refuse_programs(run: RunSpec) -> None:
    """Raise `SandboxUnavailable`, before anything is trained, when a suite runs programs and none can be run."""
    suites = [each for each in run.suites if each.kind == "utility"]
    prompts = (prompt for suite in suites for prompt in read_prompts(suite.path, kind=suite.kind))
    if any(prompt.scorer in RUNNING_SCORERS for prompt in prompts):
        require()


@cache
def is_available() -> bool:
    """Whether children get their namespaces here and can run a program in them."""
    return _run("import collections, math, re", "assert re.sub('a', 'b', 'a') == 'b'", 5.0, MEMORY_MB)


def _run(program: str, tests: str, timeout_s: float, memory_mb: int) -> bool:
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
        process.communicate()
    return said.decode(errors="replace") == word
