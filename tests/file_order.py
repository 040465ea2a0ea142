"""The order in which processes take the files of the tests: those first that took longest when they last ran.

Two processes take whole files from one list. A long file that is taken last keeps one of them busy while the other has
nothing left to do. How long each test took is in pytest's cache. The process that deals out the files reads it and
hands it to the others, so that all of them see the same order. Where nothing is known yet, as in a fresh checkout, the
files of `LONG_FILES` come first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest


class _Located(Protocol):
    @property
    def nodeid(self) -> str: ...
    @property
    def path(self) -> Path: ...


_Test = TypeVar("_Test", bound=_Located)
# The most expensive files by processor time, the most expensive first.
LONG_FILES = (
    "tests/test_demo.py",
    "tests/legacy/test_goes_on.py",
    "tests/spard/test_ranks.py",
    "tests/faults/test_network.py",
    "tests/legacy/test_half_done.py",
    "tests/worker/test_rank_processes.py",
    "tests/browser/test_dashboard.py",
    "tests/browser/test_provider.py",
    "tests/faults/test_failover.py",
    "tests/spard/test_after_tuning.py",
    "tests/spard/test_variants.py",
    "tests/worker/test_audit_engine.py",
    "tests/worker/test_attempt.py",
    "tests/test_contributing.py",
    "tests/spard/test_chat_templates.py",
)
_SECONDS = "spard/seconds"  # of each test by its id, with its share of set-up and teardown


class FileOrder:
    """Notes how long tests take, and sorts files by it where several processes share them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._took = config, defaultdict[str, float](float)
        handed: dict[str, Any] | None = getattr(config, "workerinput", None)  # xdist sets it in the processes that test
        self._is_worker = handed is not None
        self._known: dict[str, float] = handed[_SECONDS] if handed else self._read()

    def _read(self) -> dict[str, float]:
        cache = getattr(self._config, "cache", None)  # there is none with -p no:cacheprovider
        found: dict[str, float] = cache.get(_SECONDS, {}) if cache else {}
        return found

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Hand what is known to a process that xdist is about to start."""
        node.workerinput[_SECONDS] = self._known

    @pytest.hookimpl(tryfirst=True)  # what must come last for another reason is sorted later
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort files by what their tests took; tests of one file stay together and in their order."""
        if self._is_worker:
            items[:] = longest_first(items, self._known)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up set-up, call and teardown of each test."""
        self._took[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Write what the tests of this run took over what was known of them."""
        cache = getattr(self._config, "cache", None)
        if cache and not self._is_worker and self._took:
            cache.set(_SECONDS, self._read() | {name: round(took, 3) for name, took in self._took.items()})


def longest_first(items: Sequence[_Test], seconds: Mapping[str, float]) -> list[_Test]:
    """Return the items by the seconds of their files, the most first; a test that never ran counts as no time.

    Files of which no test ever ran come in the order of `LONG_FILES`, and all others after those.
    """
    of_file = defaultdict[str, float](float)
    for item in items:
        of_file[str(item.path)] += seconds.get(item.nodeid, 0.0)
    places = {name: place for place, name in enumerate(LONG_FILES)}

    def rank(item: _Test) -> tuple[float, int]:
        return -of_file[str(item.path)], places.get(item.nodeid.partition("::")[0], len(places))

    return sorted(items, key=rank)
