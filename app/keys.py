"""API keys: authentication, the end of access, browser sessions, and how a provider issues, rotates and revokes keys.

Only a key's SHA-256 is stored; 256 random bits need no slow hash. A key's secret is shown only once.

A key signs browsers in: a cookie stands for the key while the key is valid. The cookie holds 256 random bits, of which
only the SHA-256 is stored. The token in forms against cross-site requests is derived from the cookie, so code that
cannot read the cookie does not know it.

A key without an owner, like the first one, may create any key. A key with an owner creates admin keys only for that
owner: nobody can pose as a second person.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from secrets import token_hex, token_urlsafe
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import ColumnElement, and_, bindparam, delete, select, true, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app import audit_log, db
from app.db.tables import ApiKey, BrowserSession, Project, Quota
from app.errors import AppError, Forbidden, InvalidRequest, InvalidState, NotFound, Unauthorized
from app.http.schemas import Body, UnixTime

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
class Authentication:
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


_BY_PREFIX = db.PreparedStatement(
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


def authenticate(reader: db.Reader, secret: str) -> Authentication | None:
    """Authenticate a key; return None if it is not valid. An unknown prefix takes as long to refuse as a wrong key.

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
    return Authentication(principal, found.requests_per_minute, is_noted)


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


# Sign browsers in.

COOKIE = "spard_session"
SESSION_LIFETIME = timedelta(hours=12)


def begin_session(session: Session, principal: Principal) -> str:
    """Sign a browser in with a recognized key; return the value of its cookie."""
    secret = token_urlsafe(32)
    row = BrowserSession(
        digest=cookie_digest(secret), key_id=principal.key_id, expires_at=db.clock(session) + SESSION_LIFETIME
    )
    session.add(row)
    session.flush()
    audit_log.record(session, "browser.signed_in", principal.key_id)
    return secret


class _CookieRow(NamedTuple):
    """The columns of a key that a cookie stands for, the name and rate limit of its project, and the cookie's end."""

    id: str
    project_id: str
    scopes: list[str]
    revoked_at: datetime | None
    expires_at: datetime | None
    project_name: str
    requests_per_minute: int | None
    ends_at: datetime
    now: datetime  # by the database's clock


_BY_COOKIE = db.PreparedStatement(
    select(
        *(getattr(ApiKey, name) for name in _CookieRow._fields[:5]),
        Project.name,
        Quota.requests_per_minute,
        BrowserSession.expires_at.label("ends_at"),
        db.timestamp(),
    )
    .select_from(BrowserSession)
    .join(ApiKey)
    .join(Project, Project.id == ApiKey.project_id)
    .outerjoin(Quota, Quota.project_id == ApiKey.project_id)
    .where(BrowserSession.digest == bindparam("digest")),
    _CookieRow._make,
)


def recognize_cookie(reader: db.Reader, secret: str) -> Authentication | None:
    """Return the principal of a cookie, in one statement; None if cookie or key are no longer valid."""
    digest = cookie_digest(secret)
    found = _BY_COOKIE.one(reader, digest=digest)
    # The key is checked each time, so revoking it also ends its browser sessions.
    if found is None or found.ends_at <= found.now or not _is_open(found.revoked_at, found.expires_at, found.now):
        return None
    scopes = frozenset(found.scopes)
    principal = Principal(found.project_id, found.id, scopes, browser=digest, project_name=found.project_name)
    return Authentication(principal, found.requests_per_minute, is_use_noted=True)


def end_session(session: Session, secret: str) -> None:
    """Sign a browser out."""
    session.execute(delete(BrowserSession).where(BrowserSession.digest == cookie_digest(secret)))


def form_token(secret: str) -> str:
    """Return the token for this browser's forms."""
    return hmac.new(secret.encode(), b"form", hashlib.sha256).hexdigest()


def is_same_token(token: str, given: str) -> bool:
    """Return True if two tokens are equal; the time taken does not reveal where they differ."""
    return hmac.compare_digest(token.encode(), given.encode())


def cookie_digest(secret: str) -> str:
    """Return the digest under which a cookie is stored."""
    return hashlib.sha256(secret.encode()).hexdigest()


# Manage keys for the provider.

Scope = Literal["customer", "read", "admin"]
_YEARS_S = 10 * 366 * 86_400


def _customer_scopes() -> list[Scope]:
    return ["customer"]


class KeyCreate(Body):
    """A key of a project; without `expires_in_s` it is valid until it is revoked.

    The scope `read` allows a customer's GET requests only. `owner` is the person who will hold the key: a name or a
    mail address.
    """

    project_id: Annotated[str, Field(min_length=1, max_length=64)]
    name: Annotated[str, Field(pattern=r"^[\x20-\x7e]{1,64}$")]
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=3)] = Field(default_factory=_customer_scopes)
    owner: Annotated[str, Field(pattern=r"^[!-~]([ -~]{0,126}[!-~])?$")] | None = None
    expires_in_s: Annotated[int, Field(ge=60, le=_YEARS_S)] | None = None


class KeyOut(BaseModel):
    """A key; `last_used_at` is accurate to five minutes."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["api_key"] = "api_key"
    project_id: str
    name: str
    owner: str | None
    prefix: str
    scopes: list[Scope]
    created_at: UnixTime
    expires_at: UnixTime | None
    last_used_at: UnixTime | None
    revoked_at: UnixTime | None


class KeySecret(BaseModel):
    """A key with its secret, which is shown only once."""

    object: Literal["api_key.secret"] = "api_key.secret"
    key: KeyOut
    secret: str


class KeyList(BaseModel):
    """All keys, oldest first, without their secrets; including revoked and expired ones."""

    object: Literal["list"] = "list"
    data: list[KeyOut]
    has_more: Literal[False] = False


def list_keys(session: Session, project_id: str | None) -> Sequence[ApiKey]:
    """Return keys, oldest first and including revoked ones; of all projects if `project_id` is None."""
    query = select(ApiKey).order_by(ApiKey.created_at, ApiKey.id)
    return session.scalars(query if project_id is None else query.where(ApiKey.project_id == project_id)).all()


def issue_key(session: Session, caller: Principal, ask: KeyCreate) -> tuple[ApiKey, str]:
    """Create a key for an existing project; return it with its secret, which is not stored.

    Raises `NotFound` for an unknown project, and `Forbidden` if the caller may not create admin keys for another owner.
    """
    if session.get(Project, ask.project_id) is None:
        raise NotFound(f"No such project: {ask.project_id}", code="project_not_found", param="project_id")
    _check_owner(session, caller, ask.scopes, ask.owner)
    key, secret = create(session, ask.project_id, ask.name, sorted(set(ask.scopes)), ask.owner)
    key.expires_at = db.clock(session) + timedelta(seconds=ask.expires_in_s) if ask.expires_in_s else None
    session.flush()
    return key, secret


def rotate_key(session: Session, caller: Principal, key_id: str, overlap: timedelta) -> tuple[ApiKey, str]:
    """Replace a key by a new one with the same scopes and lifetime; the old one expires after `overlap`.

    Returns the new key with its secret. Raises `InvalidState` if the old key is revoked or expired.
    """
    old, now = _lock_key(session, key_id), db.clock(session)
    if not is_good(old, now):
        raise InvalidState(f"{old.id} is revoked or has expired; make a new key.")
    _check_owner(session, caller, old.scopes, old.owner)
    key, secret = create(session, old.project_id, old.name, old.scopes, old.owner)
    # The new key gets the old one's whole lifetime, not the rest of it.
    key.expires_at = now + (old.expires_at - old.created_at) if old.expires_at else None
    end = now + overlap
    # A rotation never extends the old key.
    old.expires_at = min(end, old.expires_at) if old.expires_at else end
    session.flush()
    audit_log.record(session, "key.rotated", old.id, to=key.id)
    return key, secret


def revoke_key(session: Session, key_id: str) -> ApiKey:
    """Revoke a key; revoking it again has no effect."""
    key = _lock_key(session, key_id)
    if key.revoked_at is None:
        key.revoked_at = db.clock(session)
        session.flush()
        audit_log.record(session, "key.revoked", key.id)
    return key


def _check_owner(session: Session, caller: Principal, scopes: Sequence[str], owner: str | None) -> None:
    own = session.get_one(ApiKey, caller.key_id).owner
    if "admin" in scopes and own is not None and (owner is None or owner.casefold() != own.casefold()):
        message = f"Your key belongs to {own} and creates admin keys for {own} only; ask the holder of the first key."
        raise Forbidden(message, code="another_owner")


def _lock_key(session: Session, key_id: str) -> ApiKey:
    key = session.get(ApiKey, key_id, with_for_update=True)
    if key is None:
        raise NotFound(f"No such key: {key_id}", code="key_not_found", param="key_id")
    return key
