"""What is kept, shown and noted of keys, and when they end."""

from __future__ import annotations

import logging
from datetime import timedelta
from threading import Event, Thread

import pytest
from pydantic import ValidationError
from sqlalchemy import Engine, select

from app import keys
from app.db import clock, read, transaction
from app.db.base import utc_now
from app.db.tables import ApiKey, AuditEntry, Project

GIVEN = "an operator's own long key"
HOUR = timedelta(hours=1)


@pytest.fixture
def project(engine: Engine) -> str:
    with transaction(engine) as session:
        session.add(Project(id="org-1", name="one"))
    return "org-1"


def actions(engine: Engine) -> list[str]:
    with read(engine) as session:
        return list(session.scalars(select(AuditEntry.action).order_by(AuditEntry.seq)))


def test_a_key_is_good_until_it_expires_or_is_revoked(engine: Engine, project: str) -> None:
    with transaction(engine) as session:
        key, secret = keys.create(session, project, "mine", ["customer"])
        found = []
        for expires_at, revoked_at in (
            (None, None),
            (utc_now() + HOUR, None),
            (utc_now() - HOUR, None),
            (None, utc_now()),
            (utc_now() + HOUR, utc_now()),
        ):
            key.expires_at, key.revoked_at = expires_at, revoked_at
            session.flush()
            found.append((keys.is_good(key, clock(session)), keys.authenticate(session, secret) is not None))
    assert found == [(True, True), (True, True), (False, False), (False, False), (False, False)]


def test_a_key_among_others_of_its_prefix_is_told_apart(engine: Engine, project: str) -> None:
    with transaction(engine) as session:
        mine, secret = keys.create(session, project, "mine", ["customer"])
        other, _ = keys.create(session, project, "other", ["admin"])
        other.prefix = mine.prefix
        session.flush()
        found = keys.authenticate(session, secret)
        assert found is not None
        assert found.principal.key_id == mine.id


@pytest.mark.parametrize(("minutes", "noted"), [(None, False), (4.9, True), (5.1, False)])
def test_a_use_is_noted_for_five_minutes(engine: Engine, project: str, minutes: float | None, noted: bool) -> None:
    with transaction(engine) as session:
        key, secret = keys.create(session, project, "mine", ["customer"])
        key.last_used_at = None if minutes is None else utc_now() - timedelta(minutes=minutes)
        session.flush()
        found = keys.authenticate(session, secret)
        assert found is not None
        assert found.is_use_noted is noted


def test_a_use_is_written_down_at_its_key_alone(engine: Engine, project: str) -> None:
    with transaction(engine) as session:
        mine, _ = keys.create(session, project, "mine", ["customer"])
        other, _ = keys.create(session, project, "other", ["customer"])
        keys.note_use(session, keys.Principal(project, mine.id, frozenset()))
    with read(engine) as session:
        assert session.get_one(ApiKey, mine.id).last_used_at is not None
        assert session.get_one(ApiKey, other.id).last_used_at is None


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_a_use_is_not_waited_for(engine: Engine, project: str) -> None:
    with transaction(engine) as session:
        key, _ = keys.create(session, project, "mine", ["customer"])
    with transaction(engine) as busy, transaction(engine) as other:
        busy.execute(select(ApiKey.id).where(ApiKey.id == key.id).with_for_update())
        keys.note_use(other, keys.Principal(project, key.id, frozenset()))


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_a_start_waits_for_another_that_makes_the_first_key(engine: Engine) -> None:
    with transaction(engine) as session:
        session.add(Project(id=keys.FIRST_PROJECT, name="default"))
    made: list[str | None] = []
    done = Event()

    def start() -> None:
        with transaction(engine) as session:
            made.append(keys.ensure_first(session, None))
        done.set()

    with transaction(engine) as session:
        assert keys.ensure_first(session, None)
        thread = Thread(target=start)
        thread.start()
        done.wait(0.5)  # time in which a start that does not wait would make a second key
    thread.join()
    assert made == [None]


def test_a_prefix_is_eight_characters_and_at_most_a_third(engine: Engine, project: str) -> None:
    with transaction(engine) as session:
        key, secret = keys.create(session, project, "mine", ["customer"])
        assert key.prefix == secret.removeprefix("sk-spard-")[:8]
        for given, shown in (("abcdefghi", "abc"), ("sk-spard-" + "x" * 60, "x" * 8), ("abcdefgh", "ab")):
            keys.ensure_first(session, given)
            digest = keys._digest(given)
            assert session.scalars(select(ApiKey.prefix).where(ApiKey.digest == digest)).all() == [shown]


def test_a_key_of_another_project_is_not_the_operator_s(engine: Engine, project: str) -> None:
    with transaction(engine) as session:
        keys.create(session, project, "first", ["admin"])
        assert keys.ensure_first(session, None)


def test_a_revoked_first_key_is_replaced(engine: Engine) -> None:
    with transaction(engine) as session:
        assert keys.ensure_first(session, None)
        session.scalars(select(ApiKey)).one().revoked_at = utc_now()
        session.flush()
        assert keys.ensure_first(session, None)


def test_a_given_key_leaves_keys_of_other_names_alone(engine: Engine, project: str) -> None:
    with transaction(engine) as session:
        keys.ensure_first(session, GIVEN)
        _, own = keys.create(session, keys.FIRST_PROJECT, "mine", ["admin"])
        _, foreign = keys.create(session, project, "first", ["admin"])
        keys.ensure_first(session, GIVEN + "2")
        assert [keys.authenticate(session, each) is None for each in (GIVEN, own, foreign)] == [True, False, False]


def test_what_becomes_of_given_keys_is_in_the_audit_log_once(engine: Engine) -> None:
    with transaction(engine) as session:
        for given in (GIVEN, GIVEN, GIVEN + "2", GIVEN + "2", GIVEN):
            keys.ensure_first(session, given)
        revoked = session.scalars(select(ApiKey).where(ApiKey.revoked_at.is_not(None))).one()
        since = revoked.revoked_at
        keys.ensure_first(session, GIVEN)
        assert revoked.revoked_at == since
    created, revoked_, restored = "key.created", "key.revoked", "key.restored"
    assert actions(engine)[:3] == [created, revoked_, created]
    assert sorted(actions(engine)[3:]) == [restored, revoked_]


@pytest.mark.parametrize(("length", "warned"), [(23, True), (24, False)])
def test_a_given_key_is_weak_below_24_characters(
    engine: Engine, caplog: pytest.LogCaptureFixture, length: int, warned: bool
) -> None:
    with caplog.at_level(logging.WARNING), transaction(engine) as session:
        keys.ensure_first(session, "k" * length)
    assert ("shorter than 24" in caplog.text) == warned


@pytest.mark.parametrize(
    ("seconds", "accepted"), [(59, False), (60, True), (10 * 366 * 86_400, True), (10 * 366 * 86_400 + 1, False)]
)
def test_a_key_is_asked_for_a_minute_to_ten_years(seconds: int, accepted: bool) -> None:
    try:
        keys.KeyCreate(project_id="org-1", name="mine", expires_in_s=seconds)
    except ValidationError:
        assert not accepted
    else:
        assert accepted


@pytest.mark.parametrize("seconds", [None, 3600])
def test_a_key_expires_after_the_seconds_asked_for_or_never(engine: Engine, project: str, seconds: int | None) -> None:
    with transaction(engine) as session:
        own, _ = keys.create(session, project, "mine", ["admin"])
        caller, before = keys.Principal(project, own.id, frozenset({"admin"})), clock(session)
        ask = keys.KeyCreate(project_id=project, name="theirs", expires_in_s=seconds)
        made, secret = keys.issue_key(session, caller, ask)
        assert keys.authenticate(session, secret) is not None
        if seconds is None:
            assert made.expires_at is None
        else:
            assert made.expires_at is not None
            assert before + HOUR <= made.expires_at <= clock(session) + HOUR


def test_a_key_has_its_owner_and_scopes(engine: Engine, project: str) -> None:
    with transaction(engine) as session:
        key, _ = keys.create(session, project, "mine", ["admin", "customer"], "Ada")
        assert (key.owner, key.scopes, key.project_id, key.name) == ("Ada", ["admin", "customer"], project, "mine")


def test_an_unknown_prefix_costs_a_comparison_too(
    engine: Engine, project: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[str, str]] = []

    def compare(one: str, other: str) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("app.keys.hmac.compare_digest", compare)
    with transaction(engine) as session:
        _, secret = keys.create(session, project, "mine", ["customer"])
        for each in (secret, "nobody's key"):
            keys.authenticate(session, each)
    assert len(compared) == 2
    assert {len(digest) for pair in compared for digest in pair} == {64}
