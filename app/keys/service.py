"""Create and authenticate API keys, and notice when access ends.

Only a key's SHA-256 is stored; 256 random bits need no slow hash.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from secrets import token_hex, token_urlsafe
from typing import NamedTuple

from sqlalchemy import ColumnElement, and_, bindparam, select, true, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app import audit_log, db
from app.db.tables import ApiKey, BrowserSession, Project, Quota
from app.errors import AppError, Forbidden, InvalidRequest, InvalidState, Unauthorized

FIRST_PROJECT = "org-default"
_FIRST_KEY = "first"
_FIRST_SCOPES = ["admin", "customer"]
_START = "sk-spard-"
_PREFIX_CHARS = 8
_WEAK_CHARS = 24
_NOTED_EVERY = timedelta(minutes=5)
_NO_DIGEST = "0" * 64

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Principal:
    """The key, project and scopes of a request.

    browser       the SHA-256 of the cookie if a signed-in browser sent the request; None if the key itself was sent
    project_name  the project's name for a signed-in browser, whose pages show it; else ""
    """

    project_id: str
    key_id: str
    scopes: frozenset[str]
    browser: str | None = None
    project_name: str = ""


@dataclass(frozen=True, slots=True)
class Recognized:
    """The result of a successful authentication.

    requests_per_minute  the project's own rate limit; None if it has none
    is_use_noted         True if the key's last use was stored recently
    """

    principal: Principal
    requests_per_minute: int | None
    is_use_noted: bool


class _KeyRow(NamedTuple):
    """The columns of a key that authentication reads, and its project's rate limit."""

    id: str
    project_id: str
    scopes: list[str]
    digest: str
    revoked_at: datetime | None
    expires_at: datetime | None
    last_used_at: datetime | None
    requests_per_minute: int | None
    now: datetime  # by the database's clock


_BY_PREFIX = db.Prepared(
    select(*(getattr(ApiKey, name) for name in _KeyRow._fields[:-2]), Quota.requests_per_minute, db.timestamp())
    .outerjoin(Quota, Quota.project_id == ApiKey.project_id)
    .where(ApiKey.prefix == bindparam("prefix")),
    _KeyRow._make,
)


def create(
    session: Session, project_id: str, name: str, scopes: list[str], owner: str | None = None
) -> tuple[ApiKey, str]:
    """Create a key; return it with its secret, which is not stored."""
    secret = f"{_START}{token_hex(_PREFIX_CHARS // 2)}{token_urlsafe(32)}"
    return _add(session, project_id, name, scopes, secret, owner), secret


def authenticate(reader: db.Reader, secret: str) -> Recognized | None:
    """Return the result for a valid key, else None; an unknown prefix takes as long as a wrong key.

    Every request begins with this statement, so a revoked key is refused from the next request on.
    """
    found = None
    digest = _digest(secret)
    keys = _BY_PREFIX.all(reader, prefix=_prefix(secret))
    # Prefixes may collide. All keys are compared, in constant time, so that the time does not tell which one matched.
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key
    # The same comparison for an unknown prefix, so that timing does not reveal which prefixes exist.
    if not keys:
        hmac.compare_digest(_NO_DIGEST, digest)
    if found is None or not _is_open(found.revoked_at, found.expires_at, found.now):
        return None
    last = found.last_used_at
    is_noted = last is not None and found.now - last < _NOTED_EVERY
    principal = Principal(found.project_id, found.id, frozenset(found.scopes))
    return Recognized(principal, found.requests_per_minute, is_noted)


def is_good(key: ApiKey, now: datetime) -> bool:
    """Return True if a key is neither revoked nor expired at a time of the database's clock."""
    return _is_open(key.revoked_at, key.expires_at, now)


def _is_open(revoked_at: datetime | None, expires_at: datetime | None, now: datetime) -> bool:
    return revoked_at is None and (expires_at is None or expires_at > now)


def note_use(session: Session, principal: Principal) -> None:
    """Store the time of the key's last use, unless its row is locked; the next use is stored then."""
    free = select(ApiKey.id).where(ApiKey.id == principal.key_id).with_for_update(skip_locked=True)
    session.execute(update(ApiKey).where(ApiKey.id.in_(free)).values(last_used_at=db.timestamp()))


def ensure_first(session: Session, given: str | None) -> str | None:
    """Make sure that the first project has a key; return the secret of a newly created one, to be shown once.

    A `given` key becomes the first project's key and replaces the one given before. Without one, a key is created
    unless the project has a valid admin key.
    """
    _lock_first_project(session)
    if given is not None:
        _set_given(session, given)
        return None
    if _has_admin_key(session, ApiKey.project_id == FIRST_PROJECT):
        return None
    return create(session, FIRST_PROJECT, _FIRST_KEY, _FIRST_SCOPES)[1]


def make_first(session: Session, *, force: bool) -> str:
    """Create an ownerless admin key, which may create all others, and return its secret.

    Raises `InvalidState` while a valid admin key exists, unless `force` is set.
    """
    _lock_first_project(session)
    if not force and _has_admin_key(session, true()):
        message = "An admin key exists already; make others with `spard keys create`."
        raise InvalidState(f"{message} If its secret is lost, --force makes another key.")
    return create(session, FIRST_PROJECT, _FIRST_KEY, _FIRST_SCOPES)[1]


def _has_admin_key(session: Session, which: ColumnElement[bool]) -> bool:
    """Return True if one of these keys is a valid admin key, which may create all others."""
    now = db.clock(session)
    return any("admin" in key.scopes and is_good(key, now) for key in session.scalars(select(ApiKey).where(which)))


def _lock_first_project(session: Session) -> None:
    """Lock the first project, so that processes that start together wait for each other."""
    try:
        # A savepoint: a conflict undoes this insert alone, not the caller's transaction.
        with session.begin_nested():
            if session.get(Project, FIRST_PROJECT) is None:
                session.add(Project(id=FIRST_PROJECT, name="default"))
    except IntegrityError:
        pass  # another process has just created it
    session.execute(select(Project.id).where(Project.id == FIRST_PROJECT).with_for_update())


def _set_given(session: Session, given: str) -> None:
    if not given.strip():
        raise InvalidRequest("SPARD_ADMIN_KEY is set but empty.", param="SPARD_ADMIN_KEY")
    if len(given) < _WEAK_CHARS:
        log.warning(
            "SPARD_ADMIN_KEY is shorter than %d characters: good for a trial, not for others to reach", _WEAK_CHARS
        )
    digest = _digest(given)
    known = False
    for key in session.scalars(select(ApiKey).where(ApiKey.project_id == FIRST_PROJECT, ApiKey.name == _FIRST_KEY)):
        is_given = key.digest == digest
        if is_given != (key.revoked_at is None):
            audit_log.record(session, "key.restored" if is_given else "key.revoked", key.id)
        # A key that was given before and is given again is restored.
        key.revoked_at = None if is_given else key.revoked_at or db.clock(session)
        known = known or is_given
    if not known:
        _add(session, FIRST_PROJECT, _FIRST_KEY, _FIRST_SCOPES, given)


def _add(
    session: Session, project_id: str, name: str, scopes: list[str], secret: str, owner: str | None = None
) -> ApiKey:
    key = ApiKey(project_id=project_id, name=name, owner=owner, scopes=list(scopes))
    key.prefix, key.digest = _prefix(secret), _digest(secret)
    session.add(key)
    session.flush()
    audit_log.record(session, "key.created", key.id, project=project_id, name=name, scopes=list(scopes), owner=owner)
    return key


def _prefix(secret: str) -> str:
    """Return the part of a key that may be displayed: at most a third of it."""
    shown = secret.removeprefix(_START)
    return shown[: min(_PREFIX_CHARS, len(shown) // 3)]


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


# Check repeatedly, for many callers at once, whether callers with long-running responses still have access.


def find_ended(session: Session, callers: Iterable[Principal]) -> Mapping[Principal, AppError]:
    """Return the callers whose access has ended, each with its error; runs one query for all.

    Access ends when the key is revoked, expires by the database's clock or loses a scope that it had when the request
    began; for a browser also when its session ends.
    """
    asked = set(callers)
    if not asked:
        return {}
    of_browser = and_(
        BrowserSession.key_id == ApiKey.id,
        BrowserSession.digest.in_({each.browser for each in asked if each.browser}),
        BrowserSession.expires_at > db.timestamp(),
    )
    columns = ApiKey.id, ApiKey.scopes, ApiKey.revoked_at, ApiKey.expires_at, db.timestamp(), BrowserSession.digest
    query = select(*columns).outerjoin(BrowserSession, of_browser)
    scopes, browsers = dict[str, frozenset[str]](), set[str | None]()
    for key_id, of_key, revoked_at, expires_at, now, browser in session.execute(
        query.where(ApiKey.id.in_({each.key_id for each in asked}))
    ):
        # One row per session of the key, or one with NULL if no asked session is valid.
        browsers.add(browser)
        if revoked_at is None and (expires_at is None or expires_at > now):
            scopes[key_id] = frozenset(of_key)
    errors = {each: _error(each, scopes.get(each.key_id), browsers) for each in asked}
    return {caller: error for caller, error in errors.items() if error}


def _error(caller: Principal, scopes: frozenset[str] | None, browsers: set[str | None]) -> AppError | None:
    if scopes is None:
        return Unauthorized("The API key is no longer valid; it was revoked or has expired.")
    if caller.browser and caller.browser not in browsers:
        return Unauthorized("This browser is no longer signed in.")
    if lost := sorted(caller.scopes - scopes):
        return Forbidden(f'This key no longer has the scope "{lost[0]}"; ask again with a key that has it.')
    return None
