"""The table of parts on whole jobs: `--methods parts` stands for every arm of `spard_lab.bench.parts`.

Differences are between models that are asked as the attacker does, whether the gate released them or not; the other
tables have the releases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spard.errors import InvalidRecipe
from spard.evaluation.results import SuiteKind, SuiteResult
from spard.evaluation.statistics import rate
from spard_lab.bench.adversary.rounds import Round
from spard_lab.bench.measure import Measurement
from spard_lab.bench.methods import ROW_SIGNAL
from spard_lab.bench.parts import (
    NAMES,
    PARTS_HEADING,
    Comparison,
    arms_table,
    compared_methods,
    comparisons,
    parts_table,
)
from spard_lab.bench.report import Table

WORD = "parts"
_OF_ARMS = {f"row_signal.{name}" for settings in ROW_SIGNAL.values() for name in settings}
_SUITES: dict[str, SuiteKind] = {"complied": "harmful", "refused_dressed": "benign", "right": "utility"}


def with_parts(
    methods: Sequence[str], parts: Sequence[str], provider: Sequence[tuple[str, str]]
) -> tuple[tuple[str, ...], list[Comparison]]:
    """Return the methods with `parts` replaced by the arms of the table of parts, and the questions these answer.

    Raises `InvalidRecipe` for an unknown part, or for a provider setting that the arms set themselves.
    """
    if WORD not in methods:
        if parts:
            raise InvalidRecipe(f"--parts: say which of them with --methods {WORD}", "parts")
        return tuple(methods), []
    if unknown := [each for each in parts if each not in NAMES]:
        raise InvalidRecipe(f"--parts: there is no {', '.join(unknown)}; there are {', '.join(NAMES)}", "parts")
    if given := _OF_ARMS & {path for path, _ in provider}:
        raise InvalidRecipe(f"--provider: with --methods {WORD} the arms say {min(given)} themselves", "provider")
    questions = comparisons(parts)
    whole = (arm for each in methods for arm in (compared_methods(questions) if each == WORD else (each,)))
    return tuple(dict.fromkeys(whole)), questions


def parts_tables(rounds: Sequence[Round], questions: Sequence[Comparison]) -> dict[str, Table]:
    """Return the tables that answer the questions for every attack; empty without questions."""
    found = [_as_measurement(each) for each in rounds if each.answers]
    if not questions:
        return {}
    return {PARTS_HEADING: parts_table(found, questions), "The two methods of each question": arms_table(questions)}


def _as_measurement(found: Round) -> Measurement:
    """Convert a round to a measurement, the input of the other tables."""
    hits: Mapping[str, str] = {name: str(getattr(found.answers, name)) for name in _SUITES}
    results = tuple(_result(name, kind, hits[name]) for name, kind in _SUITES.items())
    return Measurement(found.method, "", found.attack, found.seed, "", "", "", ("complied",), results, hits)


def _result(name: str, kind: SuiteKind, hits: str) -> SuiteResult:
    found = rate(hits.count("1"), len(hits))
    return SuiteResult(name, kind, "truth", found.n, 0, 0, found.hits, found.rate, found.low, found.high)
