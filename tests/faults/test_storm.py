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


def test_no_fault_loses_a_job_or_publishes_it_twice(shop: Shop, seed: int, record_property: Record) -> None:
    guards = Storm(shop, seed).run(faults=1000 if is_soak() else 60)
    record_property("guards", guards)
    assert guards.get("reaped", 0) >= (50 if is_soak() else 1), "vacuous: no lease ran out"
    assert guards.get(DIED_PUBLISHED, 0) >= (20 if is_soak() else 1), "vacuous: nobody died right after publishing"
    refused = guards.get("zombie refused", 0) + guards.get("holds refused", 0)  # of workers that were replaced
    assert refused >= (100 if is_soak() else 1), "vacuous: hardly a zombie came back"


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_service_without_this_guard_is_found_out(shop: Shop, seed: int, mutant: str, record_property: Record) -> None:
    with pytest.raises(Broken) as found:
        Storm(shop, seed, mutant).run(faults=80)
    record_property("found", str(found.value).splitlines()[0])
