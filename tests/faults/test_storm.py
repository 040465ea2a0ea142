"""Workers and customers that are killed, frozen, stopped and cut off at random, cancel and pause.

F2-F7, F26, F28, F31 and F40 of the fault table. The sleeper in place of training is the only part that is not real.
"""

from __future__ import annotations

import re

import pytest

from tests.faults.conftest import Record
from tests.faults.customer import QUOTA_REFUSED
from tests.faults.invariants import Broken
from tests.faults.mutants import MUTANTS
from tests.faults.sleeper import DIED_PUBLISHED, ZOMBIE_ACCEPTED
from tests.faults.storm import Storm, is_soak
from tests.worker.shop import Shop

STORMS = 3
FOUND_OUT: dict[str, tuple[int, dict[str, int], str]] = {  # after so many faults, and these guards, by what
    "no fencing token": (60, {ZOMBIE_ACCEPTED: 1}, "zombies were accepted|^I[234]"),
    "no lock in the claim": (60, {}, "^I4|zombies were accepted"),
    "publish before upload": (30, {DIED_PUBLISHED: 2}, "^I2"),
    "no lock in the quota": (40, {}, "^I7 .* unfinished jobs"),
    "no second try of a webhook": (15, {}, "^I10 never arrived"),
}
NEEDED = {"reaped": 1, DIED_PUBLISHED: 1, "zombie refused": 1, QUOTA_REFUSED: 10}
NEEDED_IN_SOAK = {"reaped": 50, DIED_PUBLISHED: 20, "zombie refused": 100, QUOTA_REFUSED: 1000}


def test_no_fault_loses_a_job_or_publishes_it_twice(shop: Shop, seed: int, record_property: Record) -> None:
    needed = NEEDED_IN_SOAK if is_soak() else NEEDED
    guards = Storm(shop, seed).run(faults=1000 if is_soak() else 60, needed=needed)
    record_property("guards", guards)
    hardly = [name for name, times in needed.items() if guards.get(name, 0) < times]
    assert not hardly, "vacuous: these guards hardly fired"


@pytest.mark.parametrize("mutant", MUTANTS if is_soak() else ["no fencing token"])
def test_a_service_without_this_guard_is_found_out(shop: Shop, seed: int, mutant: str, record_property: Record) -> None:
    what = FOUND_OUT[mutant][-1]
    with pytest.raises(Broken, match=f"(?m){what}") as found:
        _blow(shop, seed, mutant)
    record_property("found", next(line for line in str(found.value).splitlines() if re.search(what, line)))


def _blow(shop: Shop, seed: int, mutant: str) -> None:
    """A few storms: one that was too calm for this mutant says nothing."""
    faults, needed, _ = FOUND_OUT[mutant]
    for again in range(STORMS):
        Storm(shop, seed + again, mutant).run(faults, needed)
