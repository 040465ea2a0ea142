"""`spard objects` on the database and storage that the environment names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy import update
from typer.testing import CliRunner

from app.commands.objects import objects
from app.db import make_engine, transaction
from app.db.base import utc_now
from app.db.tables import ObjectFinding
from app.objects.reconciler import check
from app.storage import open_storage
from tests.app.test_reconciler import DAYS, OLD, ORPHAN, add_file
from tests.faults.warehouse import Warehouse
from tests.place import Place


@pytest.fixture
def warehouse(sqlite_url: str, local_place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Warehouse:
    monkeypatch.setenv("SPARD_DATABASE_URL", sqlite_url)
    monkeypatch.setenv("SPARD_STORAGE_URL", local_place.url)
    return Warehouse(make_engine(sqlite_url), open_storage(local_place.url))


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(objects, list(arguments))
    return done.exit_code, done.output


def test_all_is_well(warehouse: Warehouse) -> None:
    add_file(warehouse)
    code, text = run("check")
    assert (code, "1 objects: 0 without a row, 0 rows without an object" in text) == (0, True)


def test_a_lost_object_is_named_and_makes_the_command_fail(warehouse: Warehouse) -> None:
    file = add_file(warehouse)
    warehouse.plain.delete(file.storage_key)
    code, text = run("check", "--json")
    (found,) = json.loads(text)["findings"]
    assert (code, found["kind"], found["storage_key"]) == (1, "missing", file.storage_key)
    assert file.storage_key in run("check")[1]


def test_what_was_reported_for_days_goes_aside_and_comes_back(warehouse: Warehouse) -> None:
    warehouse.plain.write(ORPHAN, [b"orphan"])
    check(warehouse.plain, warehouse.begin, young=OLD)
    with transaction(warehouse.engine) as session:
        session.execute(update(ObjectFinding).values(first_seen_at=utc_now() - 2 * DAYS))
    assert json.loads(run("repair", "--json")[1])["moved"] == []  # of today: it may still be written
    assert run("restore")[0] == 2
    warehouse.plain.move(ORPHAN, f"aside/2099-01-01/{ORPHAN}")
    assert run("restore", ORPHAN) == (0, f"{ORPHAN}\n1 put back\n")


def test_a_storage_of_another_database_is_told_and_accepted(warehouse: Warehouse) -> None:
    run("check")
    warehouse.plain.write("spard-mark.json", [b'{"database_id": "db_theirs", "generation": 3}'])
    assert "db_theirs" in run("check")[1]
    assert run("repair", "--accept")[0] == 0
    assert "db_theirs" not in run("check")[1]
