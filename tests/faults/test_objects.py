"""COMMITs that are refused or done unanswered, SIGKILL between object and row, storage away: rows and objects agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from random import Random

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from app.db import Begin
from app.errors import AppError, InvalidState, NotFound
from app.storage import Storage, StorageError, open_storage
from tests.faults.conftest import Record
from tests.faults.cuts import HOWS, How, Killed
from tests.faults.storm import is_soak
from tests.faults.warehouse import Request, Warehouse
from tests.place import Place

SLICE, SOAK = 40, 520  # cuts for each database
_ASKED_AGAIN = 4


@pytest.fixture
def warehouse(engine: Engine, local_place: Place) -> Warehouse:
    return Warehouse(engine, open_storage(local_place.url))


def cut(warehouse: Warehouse, request: Request, at: int, how: How) -> str | None:
    """Ask with one step hurt, then as a client asks again; return what was hurt."""
    warehouse.steps.hurt(at, how)
    for asked in range(_ASKED_AGAIN):
        try:
            request.prove(request.ask())  # nobody has swept yet
            break
        except (NotFound, InvalidState):
            assert asked, "refused what had not been done"
            break  # it is done: a success that was not heard
        except (AppError, OperationalError, Killed) as error:
            hurt, said = warehouse.steps.has_hurt, repr(error)
            warehouse.steps.calm()
    else:
        raise AssertionError(f"asked again, it still fails: {said}")
    hurt = warehouse.steps.has_hurt if not asked else hurt
    warehouse.steps.calm()
    return hurt


def test_no_cut_parts_rows_from_objects(warehouse: Warehouse, seed: int, record_property: Record) -> None:
    rng, cuts = Random(seed), Counter[str]()
    plans = warehouse.requests()
    lengths = {}
    for name, prepare in plans.items():
        request = prepare()
        warehouse.steps.calm()
        request.prove(request.ask())
        lengths[name] = warehouse.steps.taken
        warehouse.forget_attempts()
        warehouse.sweep()
        assert warehouse.wrong() == [], name
    places = [(name, at, how) for name, n in lengths.items() for at in range(1, n + 1) for how in HOWS]
    wanted = SOAK if is_soak() else SLICE
    for name, at, how in (rng.sample(places, min(wanted, len(places))) + rng.choices(places, k=wanted))[:wanted]:
        hurt = cut(warehouse, plans[name](), at, how)
        if hurt is None:
            continue  # the way was shorter this time
        cuts[f"{hurt} {how}"] += 1
        warehouse.forget_attempts()
        warehouse.sweep()
        assert warehouse.wrong() == [], (name, at, how)
    record_property("cuts", dict(cuts))
    assert cuts.total() > wanted // 2, "vacuous: hardly a step was hurt"


def cut_everywhere(warehouse: Warehouse, name: str) -> None:
    """Lose the answer to each step in turn."""
    for at in range(1, 20):
        cut(warehouse, warehouse.requests()[name](), at, "unanswered")
        warehouse.forget_attempts()
        warehouse.sweep()
        assert warehouse.wrong() == []


def deleted_whatever_happened(storage: Storage, begin: Begin, keys: Collection[str]) -> None:
    """What a failed write did before there were intents."""
    with suppress(StorageError):
        for key in keys:
            storage.delete(key)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("mutant", "name"),
    [
        (("app.objects.intents._delete_unnamed", deleted_whatever_happened), "POST /files"),
        (("app.objects.intents._delete_unnamed", deleted_whatever_happened), "POST /uploads/{id}/complete"),
        (("app.objects.perform", lambda storage, begin, subject: None), "DELETE /jobs/{id}?include_files"),
    ],
)
def test_cuts_find_a_service_that_does_it_otherwise(
    warehouse: Warehouse, mutant: tuple[str, object], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*mutant)
    with pytest.raises(AssertionError):
        cut_everywhere(warehouse, name)
