"""Processes that start in milliseconds: forked from one that has everything imported, and that runs no thread."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def context() -> ForkServerContext:
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(
        ["tests.faults.sleeper", "tests.faults.customer", "tests.faults.trainer", "tests.faults.writer"]
    )
    return found
