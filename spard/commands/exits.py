"""The exit codes of every command."""

from __future__ import annotations

OK = 0
ERROR = 1  # an error, explained by the message
NOT_PASSED = 2  # the command worked, and a gate, judge or pool did not pass
USAGE = 3  # the command line is invalid, and nothing was done
INTERRUPTED = 130
