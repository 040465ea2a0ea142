"""Implementations by name: those of this package, and those that installed packages add through entry points.

A package adds to a registry with one line in its metadata, here a scorer of utility suites:

    [project.entry-points."spard.scorers"]
    rouge = "my_package.rouge:score_rouge"

Names are known without importing an implementation, so that the service can check them where torch is not installed.
An implementation is imported when it is first loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from spard.errors import InvalidExtension


@dataclass(frozen=True, slots=True)
class Registry:
    """Implementations of one kind.

    group    entry-point group in which other packages register theirs.
    kind     name of the kind, for messages.
    shipped  implementations of this package, name -> "module:attribute".

        >>> REPLY_SCORERS.load("exact")("42", "42")
        Mark(is_right=True, note='')
    """

    group: str
    kind: str
    shipped: Mapping[str, str]

    def names(self) -> tuple[str, ...]:
        """Return all names, this package's first."""
        return (*self.shipped, *self._plugins())

    def load(self, name: str) -> Any:
        """Import and return the implementation of this name; raise `KeyError` if there is none."""
        if name not in self.shipped:
            return load_entry(self._plugins()[name], self.kind)
        module, _, attribute = self.shipped[name].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def _plugins(self) -> dict[str, EntryPoint]:
        return load_entry_points(self.group, self.kind, frozenset(self.shipped))


@dataclass(frozen=True, slots=True)
class NameIn:
    """A marker in `Annotated[str, ...]` for any name of a registry; pydantic shows the names as an enumeration."""

    registry: Registry

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {"type": "literal", "expected": list(self.registry.names())}


@cache
def load_entry_points(group: str, kind: str, taken: frozenset[str]) -> dict[str, EntryPoint]:
    """Return a group's entry points by name; raise `InvalidExtension` for a name taken or registered twice."""
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=group), key=lambda entry: (entry.name, _package(entry))):
        if entry.name in taken:
            raise InvalidExtension(f"{_package(entry)} registers the {kind} {entry.name!r}, a name of spard's own")
        if entry.name in found:
            others = f"{_package(found[entry.name])} and {_package(entry)}"
            raise InvalidExtension(f"{others} both register the {kind} {entry.name!r}; uninstall one of them")
        found[entry.name] = entry
    return found


def load_entry(entry: EntryPoint, kind: str) -> Any:
    """Import the object of an entry point; raise `InvalidExtension` if that fails."""
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        message = f"the {kind} {entry.name!r} of {_package(entry)} ({entry.value}) cannot be imported: {error}"
        raise InvalidExtension(message) from error


def reject_entry(entry: EntryPoint, kind: str, why: str) -> InvalidExtension:
    """Return the error for an entry point whose object is not of the kind that its group requires."""
    return InvalidExtension(f"the {kind} {entry.name!r} of {_package(entry)} ({entry.value}) {why}")


def _package(entry: EntryPoint) -> str:
    return f"the package {entry.dist.name}" if entry.dist else "an installed package"


_SCORERS = "spard.evaluation.scorers"
_JUDGES = "spard.evaluation.judges"
_SELECT = "spard.selection.select"

REPLY_SCORERS = Registry(
    "spard.scorers",
    "scorer",
    {
        "exact": f"{_SCORERS}:score_exact",
        "contains": f"{_SCORERS}:score_contains",
        "gsm8k": f"{_SCORERS}:score_flexible",
        "gsm8k_strict": f"{_SCORERS}:score_strict",
        "mbpp": f"{_SCORERS}:score_mbpp",
        "openbookqa": f"{_SCORERS}:score_openbookqa",
        "sst2": f"{_SCORERS}:score_sst2",
    },
)
"""Functions `(reply, expected answer) -> Mark`, for utility suites in which the model writes a reply."""

RUNNING_SCORERS = ("mbpp",)
"""Reply scorers that execute the code that the model wrote."""

LIKELIHOOD_SCORERS = ("likelihood", "likelihood_norm")
"""Scorers for which the model writes nothing: its answer is the most likely of the row's choices."""

JUDGES = Registry(
    "spard.judges",
    "judge",
    {
        "refusal": f"{_JUDGES}:open_refusal",
        "llm": f"{_JUDGES}:open_llm",
        "classifier": f"{_JUDGES}:open_classifier",
        "consensus": f"{_JUDGES}:open_consensus",
        "base": f"{_JUDGES}:open_base",
        "local": f"{_JUDGES}:open_local",
    },
)
"""Functions `JudgeSpec -> Judge`."""

SELECTIONS = Registry(
    "spard.selections",
    "selection",
    {
        "relevance_diversity": f"{_SELECT}:no_order",
        "random": f"{_SELECT}:random_order",
        "max_quality": f"{_SELECT}:quality_order",
        "high_similarity": f"{_SELECT}:nearest_first",
        "low_similarity": f"{_SELECT}:farthest_first",
    },
)
"""Functions `Candidates -> order of all pool rows`; None instead of an order means the greedy choice that weighs
diversity."""


def scorer_names() -> tuple[str, ...]:
    """Return every scorer that a row of a utility suite may name."""
    return (*REPLY_SCORERS.names(), *LIKELIHOOD_SCORERS)
