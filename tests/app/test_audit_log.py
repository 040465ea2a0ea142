"""The audit log: one chain whoever writes, refused changes, and damage that is named."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.exc import DatabaseError

from app import audit_log
from app.audit_log import Broken, Chain
from app.db import read, transaction
from app.db.tables import AuditEntry
from spard.commands import main

DROP = {
    "sqlite": ["DROP TRIGGER audit_log_update", "DROP TRIGGER audit_log_delete"],
    "postgresql": ["DROP TRIGGER audit_log_kept ON audit_log"],
}


def write(engine: Engine, n: int) -> None:
    for i in range(n):
        with transaction(engine) as session:
            audit_log.record(session, "file.uploaded", f"file-{i}", bytes=i)


def verify_log(engine: Engine) -> Chain | Broken:
    with read(engine) as session:
        return audit_log.verify(session)


def damage(engine: Engine, statement: str) -> None:
    """As somebody does who owns the database: the triggers are no hindrance."""
    with transaction(engine) as session:
        for each in [*DROP[engine.dialect.name], statement]:
            session.execute(text(each))


def test_an_empty_log_holds(engine: Engine) -> None:
    assert verify_log(engine) == Chain(0, "0" * 64)


def test_rows_follow_from_one_another(engine: Engine) -> None:
    write(engine, 5)
    with read(engine) as session:
        last = session.scalars(select(AuditEntry.hash).order_by(AuditEntry.seq)).all()[-1]
    assert verify_log(engine) == Chain(5, last)


def test_many_writers_at_once_make_one_chain(engine: Engine) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, [engine] * 8, [5] * 8))
    found = verify_log(engine)
    assert isinstance(found, Chain)
    assert found.rows == 40


def test_what_is_rolled_back_leaves_no_gap(engine: Engine) -> None:
    write(engine, 2)
    with transaction(engine) as session:
        audit_log.record(session, "file.uploaded", "file-lost")
        session.rollback()
    write(engine, 1)
    found = verify_log(engine)
    assert isinstance(found, Chain)
    assert found.rows == 3


@pytest.mark.parametrize("statement", ["UPDATE audit_log SET result = 'ok'", "DELETE FROM audit_log"])
def test_the_database_refuses_to_change_it(engine: Engine, statement: str) -> None:
    write(engine, 2)
    with pytest.raises(DatabaseError, match="never changed"), transaction(engine) as session:
        session.execute(text(statement))


DAMAGES = {
    "an actor": ("UPDATE audit_log SET actor = 'key_x' WHERE seq = 3", 3),
    "a result": ("UPDATE audit_log SET result = 'denied' WHERE seq = 1", 1),
    "details": ("""UPDATE audit_log SET details = '{"bytes": 9}' WHERE seq = 2""", 2),
    "a hash": ("UPDATE audit_log SET hash = 'feed' WHERE seq = 4", 4),
    "a row in between": ("DELETE FROM audit_log WHERE seq = 3", 3),
    "the first row": ("DELETE FROM audit_log WHERE seq = 1", 1),
    "two rows swapped": ("UPDATE audit_log SET seq = CASE seq WHEN 2 THEN -3 ELSE -2 END WHERE seq IN (2, 3)", 1),
}


@pytest.mark.parametrize(("statement", "seq"), DAMAGES.values(), ids=DAMAGES)
def test_the_first_bad_row_is_named(engine: Engine, statement: str, seq: int) -> None:
    write(engine, 5)
    damage(engine, statement)
    found = verify_log(engine)
    assert isinstance(found, Broken)
    assert found.seq == seq


@pytest.fixture
def command(
    engine: Engine, database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    monkeypatch.setenv("SPARD_DATABASE_URL", database_url)

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["audit-log", "verify", *arguments])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out + captured.err

    return run


def test_the_command_tells_the_head_and_the_damage(command: Any, engine: Engine) -> None:
    write(engine, 5)
    code, told = command()
    assert (code, told.startswith("5 rows")) == (0, True)
    damage(engine, "UPDATE audit_log SET target = 'file-x' WHERE seq = 3")
    code, told = command()
    assert code == 1
    assert "row 3: it was changed" in told


def test_rows_cut_off_at_the_end_are_found_by_a_head_noted_before(command: Any, engine: Engine) -> None:
    write(engine, 5)
    head = command()[1].strip().rpartition("head: ")[2]
    assert command("--known", head)[0] == 0
    damage(engine, "DELETE FROM audit_log WHERE seq = 5")
    assert command()[0] == 0
    code, told = command("--known", head)
    assert code == 1
    assert "row 5: it is gone" in told
