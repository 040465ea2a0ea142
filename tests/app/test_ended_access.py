"""Callers whose answers go on for long lose them when their keys, scopes or sessions end, on both databases."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, event, update

from app import keys
from app.db import clock, read, transaction
from app.db.tables import ApiKey, BrowserSession, Project
from app.keys import Principal, find_ended

SECOND = timedelta(seconds=1)


@pytest.fixture
def callers(engine: Engine) -> list[Principal]:
    """Seven callers of one project, each with a key of its own; the last two are browsers."""
    with transaction(engine) as session:
        session.add(Project(id="org-1", name="one"))
        session.flush()
        made = [keys.create(session, "org-1", str(i), ["admin", "customer"])[0] for i in range(7)]
        found = [Principal("org-1", key.id, frozenset(key.scopes)) for key in made]
        cookies = [keys.begin_session(session, each) for each in found[5:]]
        browsers = [keys.recognize_cookie(session, cookie) for cookie in cookies]
        return [*found[:5], *(each.principal for each in browsers if each)]


def end_in_every_way(engine: Engine, callers: list[Principal]) -> None:
    """End the second to the sixth caller's access, each in another way."""
    _, revoked, expired, narrowed, erased, signed_out, _ = callers
    with transaction(engine) as session:
        now = clock(session)
        session.execute(update(ApiKey).where(ApiKey.id == revoked.key_id).values(revoked_at=now))
        session.execute(update(ApiKey).where(ApiKey.id == expired.key_id).values(expires_at=now - SECOND))
        session.execute(update(ApiKey).where(ApiKey.id == narrowed.key_id).values(scopes=["customer"]))
        session.delete(session.get_one(ApiKey, erased.key_id))
        session.query(BrowserSession).filter_by(digest=signed_out.browser).delete()


def test_every_way_of_losing_access_is_found_in_one_statement(engine: Engine, callers: list[Principal]) -> None:
    with read(engine) as session:
        assert find_ended(session, callers) == {}
    end_in_every_way(engine, callers)
    statements = list[str]()
    event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    with read(engine) as session:
        found = find_ended(session, callers)
    assert [found[each].status if each in found else 200 for each in callers] == [200, 401, 401, 403, 401, 401, 200]
    assert '"admin"' in found[callers[3]].message
    assert len(statements) == 1


def test_a_session_that_has_expired_ends_too(engine: Engine, callers: list[Principal]) -> None:
    with transaction(engine) as session:
        session.execute(update(BrowserSession).values(expires_at=clock(session) - SECOND))
    with read(engine) as session:
        assert set(find_ended(session, callers)) == set(callers[5:])


def test_a_key_is_judged_by_the_clock_of_the_database_alone(
    engine: Engine, callers: list[Principal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process whose clock is two hours behind takes no expired key, and hands out no longer lives."""

    class Behind(datetime):
        @classmethod
        def now(cls, tz: object = None) -> Behind:
            return cls.fromtimestamp(datetime.now(UTC).timestamp() - 7200, UTC)

    monkeypatch.setattr("app.db.base.datetime", Behind)
    with transaction(engine) as session:
        key, secret = keys.create(session, "org-1", "short", ["customer"])
        key.expires_at = clock(session) - SECOND
        session.flush()
        assert keys.authenticate(session, secret) is None
        key.expires_at = clock(session) + timedelta(hours=1)
        session.flush()
        assert keys.authenticate(session, secret) is not None
        cookie = keys.begin_session(session, callers[0])
        ends_at = session.get_one(BrowserSession, keys.cookie_digest(cookie)).expires_at
        assert abs(ends_at - clock(session) - keys.SESSION_LIFETIME) < timedelta(hours=1)
