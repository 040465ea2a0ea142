"""The public keys that adapters are signed with; open to everybody, because verifiers need not be customers."""

from __future__ import annotations

import logging
import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.errors import NotFound
from app.settings import Settings
from app.signing import NoSigningKey, published_keys

log = logging.getLogger(__name__)
router = APIRouter(prefix="/v1/signing_keys", tags=["signing keys"])

_KEPT_S = 60  # seconds that an answer is cached, so that many requests cost one signature


@router.get("", response_class=Response, responses={200: {"content": {"application/json": {}}}})
def list_signing_keys(request: Request) -> Response:
    """List all keys, old and revoked ones too, signed by the current key, for `spard verify --key-set URL`."""
    now = time.monotonic()
    made_at, text = getattr(request.app.state, "published_keys", (-_KEPT_S, ""))
    if now - made_at >= _KEPT_S:
        settings: Settings = request.app.state.settings
        try:
            text = published_keys(settings)
        except NoSigningKey as error:  # its text contains local paths
            log.warning("signing keys are not shown: %s", error.message)
            raise NotFound("This service has no signing key.", code="no_signing_key") from None
        request.app.state.published_keys = now, text
    return Response(text, media_type="application/json", headers={"cache-control": f"public, max-age={_KEPT_S}"})
