"""`spard keys first`: the way in, made against the database without a key."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine

from app import db, keys
from app.db.base import utc_now
from app.db.tables import ApiKey, AuditEntry
from app.errors import InvalidState
from spard.commands import main
from tests.narrowing import require

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command on the database's machine; its exit code and what it printed."""
    monkeypatch.setenv("SPARD_DATABASE_URL", database_url)
    monkeypatch.setenv("SPARD_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("SPARD_API_KEY", raising=False)

    def command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out, told.err

    return command


def test_a_key_is_printed_alone_and_opens_the_service(run: Run, engine: Engine) -> None:
    code, secret, _ = run("keys", "first")
    assert code == 0
    with db.read(engine) as session:
        found = keys.authenticate(session, secret.removesuffix("\n"))
        assert found is not None
        assert found.principal.scopes == {"admin", "customer"}
        assert [entry.action for entry in session.query(AuditEntry)] == ["key.created"]


def test_a_second_one_is_refused_unless_forced(run: Run, engine: Engine) -> None:
    run("keys", "first")
    code, out, err = run("keys", "first")
    assert (code, out) == (1, "")
    assert "An admin key exists already" in err
    assert "--force" in err
    assert run("keys", "first", "--force")[0] == 0


def test_a_key_that_is_revoked_or_no_admin_s_does_not_count(run: Run, engine: Engine) -> None:
    with db.transaction(engine) as session:
        first = keys.make_first(session, force=False)
        found = keys.authenticate(session, first)
        assert found is not None
        keys.create(session, found.principal.project_id, "customer", ["customer"])
        session.get_one(ApiKey, found.principal.key_id).revoked_at = utc_now()
    assert run("keys", "first")[0] == 0


@pytest.mark.parametrize("change", ["expired", "revoked", "of a customer"])
def test_a_start_makes_a_key_where_none_that_is_left_opens_the_service(change: str, engine: Engine) -> None:
    """A key that has expired or lacks `admin` is no way in, though nobody has revoked it."""
    with db.transaction(engine) as session:
        first = keys.ensure_first(session, None)
        assert first is not None
        assert keys.ensure_first(session, None) is None
        key = session.get_one(ApiKey, require(keys.authenticate(session, first)).principal.key_id)
        if change == "expired":
            key.expires_at = utc_now() - timedelta(days=1)
        elif change == "revoked":
            key.revoked_at = utc_now()
        else:
            key.scopes = ["customer"]
        session.flush()
        assert keys.ensure_first(session, None)
        assert keys.ensure_first(session, None) is None


def test_of_two_operators_one_makes_it(engine: Engine) -> None:
    def make(_: int) -> bool:
        try:
            with db.transaction(engine) as session:
                keys.make_first(session, force=False)
        except InvalidState:
            return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert sorted(threads.map(make, range(4))) == [False, False, False, True]


def test_an_empty_database_is_told_of(empty_postgres_url: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARD_DATABASE_URL", empty_postgres_url)
    code, out, err = run("keys", "first")
    assert (code, out) == (1, "")
    assert "spard migrate" in err
