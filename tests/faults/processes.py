"""Processes that start in milliseconds: forked from one that has everything imported, and that runs no thread."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def context() -> ForkServerContext:
    found = multiprocessing.get_context("forkserver")
    modules = ("sleeper", "customer", "trainer", "writer", "api_process", "worker_process")
    found.set_forkserver_preload([f"tests.faults.{name}" for name in modules])
    return found
