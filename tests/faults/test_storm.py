"""Workers that are killed, frozen, stopped and cut off at random while customers cancel and pause.

F2-F7, F26, F28, F31 and F40 of the fault table. The sleeper in place of training is the only part that is not real.
"""

from __future__ import annotations

import pytest

from tests.faults.conftest import Record
from tests.faults.invariants import Broken
from tests.faults.mutants import MUTANTS
from tests.faults.sleeper import DIED_PUBLISHED
from tests.faults.storm import Storm, is_soak
from tests.worker.shop import Shop

STORMS = 3


def test_no_fault_loses_a_job_or_publishes_it_twice(shop: Shop, seed: int, record_property: Record) -> None:
    for again in range(STORMS):  # one in which no guard fired says nothing
        guards = Storm(shop, seed + again).run(faults=1000 if is_soak() else 60)
        record_property("guards", guards)
        missing = _vacuous(guards)
        if not missing:
            break
    assert not missing


def _vacuous(guards: dict[str, int]) -> list[str]:
    """What would have to happen for the storm to say something; counts add up over the storms of a test."""
    refused = guards.get("zombie refused", 0) + guards.get("holds refused", 0)  # of workers that were replaced
    fired = {
        "no lease ran out": guards.get("reaped", 0) >= (50 if is_soak() else 1),
        "nobody died right after publishing": guards.get(DIED_PUBLISHED, 0) >= (20 if is_soak() else 1),
        "hardly a zombie came back": refused >= (100 if is_soak() else 1),
    }
    return [what for what, is_enough in fired.items() if not is_enough]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_service_without_this_guard_is_found_out(shop: Shop, seed: int, mutant: str, record_property: Record) -> None:
    with pytest.raises(Broken) as found:
        _run_storms(shop, seed, mutant)
    record_property("found", str(found.value).splitlines()[0])


def _run_storms(shop: Shop, seed: int, mutant: str) -> None:
    for again in range(STORMS):
        Storm(shop, seed + again, mutant).run(faults=80)
