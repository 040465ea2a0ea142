"""Browsers that were signed in with a key: a cookie stands for the key, for as long as the key is good.

The cookie holds 256 random bits, of which the SHA-256 is kept. The token that forms carry against cross-site requests
is derived from the cookie, so that whoever cannot read the one does not know the other.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import timedelta
from secrets import token_urlsafe

from sqlalchemy import delete
from sqlalchemy.orm import Session

from app.audit_log import service as audit_log
from app.db.base import utc_now
from app.db.tables import ApiKey, BrowserSession
from app.keys.service import Principal, is_good

COOKIE = "spard_session"
STAYS = timedelta(hours=12)


def begin(session: Session, principal: Principal) -> str:
    """Sign a browser in with a key that was recognized; returns what its cookie holds."""
    secret = token_urlsafe(32)
    row = BrowserSession(digest=_digest(secret), key_id=principal.key_id, expires_at=utc_now() + STAYS)
    session.add(row)
    session.flush()
    audit_log.record(session, "browser.signed_in", principal.key_id)
    return secret


def recognized(session: Session, secret: str) -> Principal | None:
    """Return whom a cookie stands for; None if it has expired, or its key is no longer good."""
    row = session.get(BrowserSession, _digest(secret))
    if row is None or row.expires_at <= utc_now():
        return None
    key = session.get_one(ApiKey, row.key_id)
    return Principal(key.project_id, key.id, frozenset(key.scopes)) if is_good(key) else None


def end(session: Session, secret: str) -> None:
    """Sign a browser out."""
    session.execute(delete(BrowserSession).where(BrowserSession.digest == _digest(secret)))


def form_token(secret: str) -> str:
    """Return the token that the forms of this browser carry."""
    return hmac.new(secret.encode(), b"form", hashlib.sha256).hexdigest()


def is_same(token: str, given: str) -> bool:
    """Whether two tokens are the same, in a time that does not tell where they differ."""
    return hmac.compare_digest(token.encode(), given.encode())


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
