"""The exit codes of every command."""

from __future__ import annotations

OK = 0
ERROR = 1  # something went wrong, and the message says what
NOT_PASSED = 2  # all went well, and the answer is no: a gate, a judge or a pool that did not pass
USAGE = 3  # the command was not understood, and nothing was done
INTERRUPTED = 130
