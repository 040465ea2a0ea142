"""Check repeatedly, for many callers at once, whether callers with long-running responses still have access."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sqlalchemy import and_, select
from sqlalchemy.orm import Session

from app import db
from app.db.tables import ApiKey, BrowserSession
from app.errors import AppError, Forbidden, Unauthorized
from app.keys.service import Principal


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
