"""Who is let in."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, select

from app import keys
from app.db import read, transaction
from app.db.base import utc_now
from app.db.tables import ApiKey, Project, Quota
from app.errors import InvalidRequest

GIVEN = "an operator's own long key"


@pytest.fixture
def project(engine: Engine) -> str:
    with transaction(engine) as session:
        session.add(Project(id="org-1", name="one"))
    return "org-1"


def test_a_key_is_recognized(engine: Engine, project: str) -> None:
    with transaction(engine) as session:
        key, secret = keys.create(session, project, "mine", ["customer"])
        found = keys.authenticate(session, secret)
        assert found == keys.Authentication(keys.Principal(project, key.id, frozenset({"customer"})), None, False)
        session.add(Quota(project_id=project, requests_per_minute=7))
        session.flush()
        found = keys.authenticate(session, secret)
        assert found is not None
        assert found.requests_per_minute == 7


def test_a_key_names_its_maker_and_is_long(engine: Engine, project: str) -> None:
    with transaction(engine) as session:
        key, secret = keys.create(session, project, "mine", ["customer"])
    assert secret.startswith(f"sk-spard-{key.prefix}")
    assert len(secret) == len("sk-spard-") + 8 + 43


def test_the_database_does_not_hold_the_secret(engine: Engine, project: str) -> None:
    with transaction(engine) as session:
        _, secret = keys.create(session, project, "mine", ["customer"])
    with read(engine) as session:
        stored = str(session.execute(select(*ApiKey.__table__.columns)).all())
    assert secret[len("sk-spard-") + 8 :] not in stored


@pytest.mark.parametrize("wrong", ["", "sk-spard-", "sk-spard-00000000" + "x" * 43, "\xff" * 60])
def test_another_secret_is_not_recognized(engine: Engine, project: str, wrong: str) -> None:
    with transaction(engine) as session:
        keys.create(session, project, "mine", ["customer"])
        assert keys.authenticate(session, wrong) is None


def test_a_right_prefix_with_a_wrong_rest_is_not_recognized(engine: Engine, project: str) -> None:
    with transaction(engine) as session:
        _, secret = keys.create(session, project, "mine", ["customer"])
        assert keys.authenticate(session, secret[:-1] + ("a" if secret[-1] != "a" else "b")) is None


def test_a_revoked_key_is_not_recognized(engine: Engine, project: str) -> None:
    with transaction(engine) as session:
        key, secret = keys.create(session, project, "mine", ["customer"])
        key.revoked_at = utc_now()
        session.flush()
        assert keys.authenticate(session, secret) is None


def test_the_first_start_makes_a_key_that_may_do_all(engine: Engine) -> None:
    with transaction(engine) as session:
        secret = keys.ensure_first(session, None)
        assert secret
        found = keys.authenticate(session, secret)
        assert found
        assert found.principal.project_id == keys.FIRST_PROJECT
        assert found.principal.scopes == {"admin", "customer"}


def test_a_later_start_makes_no_key(engine: Engine) -> None:
    with transaction(engine) as session:
        keys.ensure_first(session, None)
        assert keys.ensure_first(session, None) is None


def test_processes_that_start_together_make_one_key(engine: Engine) -> None:
    def start(_: int) -> str | None:
        with transaction(engine) as session:
            return keys.ensure_first(session, None)

    with ThreadPoolExecutor(4) as pool:
        assert sum(secret is not None for secret in pool.map(start, range(4))) == 1


def test_a_given_key_is_the_first_key(engine: Engine) -> None:
    with transaction(engine) as session:
        assert keys.ensure_first(session, GIVEN) is None
        assert keys.authenticate(session, GIVEN)


def test_giving_a_key_again_changes_nothing(engine: Engine) -> None:
    with transaction(engine) as session:
        keys.ensure_first(session, GIVEN)
        keys.ensure_first(session, GIVEN)
        assert len(session.scalars(select(ApiKey)).all()) == 1


def test_a_new_given_key_replaces_the_old_one(engine: Engine) -> None:
    with transaction(engine) as session:
        keys.ensure_first(session, GIVEN)
        keys.ensure_first(session, GIVEN + "2")
        assert [keys.authenticate(session, key) is None for key in (GIVEN, GIVEN + "2")] == [True, False]


def test_an_old_given_key_can_come_back(engine: Engine) -> None:
    with transaction(engine) as session:
        for given in (GIVEN, GIVEN + "2", GIVEN):
            keys.ensure_first(session, given)
        assert [keys.authenticate(session, key) is None for key in (GIVEN, GIVEN + "2")] == [False, True]


def test_a_short_given_key_is_taken_with_a_warning(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with transaction(engine) as session:
        keys.ensure_first(session, "admin")

    with transaction(engine) as session:
        assert keys.authenticate(session, "admin") is not None
    assert "shorter than 24" in caplog.text


def test_an_empty_given_key_is_refused(engine: Engine) -> None:
    with transaction(engine) as session, pytest.raises(InvalidRequest, match="empty"):
        keys.ensure_first(session, " ")
