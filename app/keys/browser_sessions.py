"""Sign browsers in with a key: a cookie stands for the key while the key is valid.

The cookie holds 256 random bits, of which only the SHA-256 is stored. The token in forms against cross-site requests is
derived from the cookie, so code that cannot read the cookie does not know it.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import timedelta
from secrets import token_urlsafe

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from app import audit_log, db
from app.db.tables import ApiKey, BrowserSession, Project, Quota
from app.keys.service import Principal, Recognized, is_good

COOKIE = "spard_session"
STAYS = timedelta(hours=12)


def begin(session: Session, principal: Principal) -> str:
    """Sign a browser in with a recognized key; return the value of its cookie."""
    secret = token_urlsafe(32)
    row = BrowserSession(digest=cookie_digest(secret), key_id=principal.key_id, expires_at=db.clock(session) + STAYS)
    session.add(row)
    session.flush()
    audit_log.record(session, "browser.signed_in", principal.key_id)
    return secret


def recognize_cookie(session: Session, secret: str) -> Recognized | None:
    """Return the principal of a cookie, in one statement; None if cookie or key are no longer valid."""
    columns = (BrowserSession.expires_at, ApiKey, Project.name, Quota.requests_per_minute, db.timestamp())
    query = select(*columns).select_from(BrowserSession).join(ApiKey).join(Project, Project.id == ApiKey.project_id)
    digest = cookie_digest(secret)
    query = query.outerjoin(Quota, Quota.project_id == ApiKey.project_id)
    found = session.execute(query.where(BrowserSession.digest == digest)).one_or_none()
    if found is None:
        return None
    expires_at, key, name, per_minute, now = found
    # The key is checked each time, so revoking it also ends its browser sessions.
    if expires_at <= now or not is_good(key, now):
        return None
    principal = Principal(key.project_id, key.id, frozenset(key.scopes), browser=digest, project_name=name)
    return Recognized(principal, per_minute, is_use_noted=True)


def end(session: Session, secret: str) -> None:
    """Sign a browser out."""
    session.execute(delete(BrowserSession).where(BrowserSession.digest == cookie_digest(secret)))


def form_token(secret: str) -> str:
    """Return the token for this browser's forms."""
    return hmac.new(secret.encode(), b"form", hashlib.sha256).hexdigest()


def is_same(token: str, given: str) -> bool:
    """Return True if two tokens are equal; the time taken does not reveal where they differ."""
    return hmac.compare_digest(token.encode(), given.encode())


def cookie_digest(secret: str) -> str:
    """Return the digest under which a cookie is stored."""
    return hashlib.sha256(secret.encode()).hexdigest()
