"""Define the errors that the service raises deliberately: a message that callers can act on, and an HTTP status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spard.errors import UserError


class AppError(UserError):
    """Base of all errors, with the fields of OpenAI's error envelope; subclasses set the defaults."""

    status = 400
    type = "invalid_request_error"
    code: str | None = None
    retry_after_s: int | None = None
    is_final = False  # a retry of the same request fails too
    is_worth_retrying = False  # sets `x-should-retry: true`

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        type: str | None = None,
        status: int | None = None,
        details: Sequence[Mapping[str, object]] | None = None,
        details_url: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.code
        self.param = param
        self.type = type or self.type
        self.status = status or self.status
        self.details = details
        self.details_url = details_url


class InvalidRequest(AppError):
    """A field is missing, unknown, of the wrong type or out of range."""


class InvalidState(AppError):
    """The thing exists, but its state does not allow the request. Never a 409, which clients retry."""

    code = "invalid_state"


class Unauthorized(AppError):
    """The request has no key, or its key is invalid, expired or revoked."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(AppError):
    """The key is valid but lacks a required scope."""

    status = 403
    type = "permission_error"
    code = "insufficient_scope"


class NotFound(AppError):
    """The thing does not exist or is not the caller's; callers cannot tell which."""

    status = 404
    code = "not_found"


class HasNone(NotFound):
    """The caller's own thing lacks the requested part; not logged as a guess at an id."""


class Conflict(AppError):
    """Another request changed the same thing at the same time; clients retry and find its result."""

    status = 409
    code = "conflict"


class Stalled(AppError):
    """The body arrived too slowly; nothing of it was kept."""

    status = 408
    code = "request_timeout"


class TooLarge(AppError):
    """The body exceeds the limit; nothing of it was kept."""

    status = 413
    code = "file_too_large"


class UnsupportedMedia(AppError):
    """The request's content type or encoding is not supported."""

    status = 415
    code = "unsupported_content_type"


class TooManyRequests(AppError):
    """A rate limit of this key or project is reached."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retry_after_s = 1


class Reserved(TooManyRequests):
    """The rest of a limit is reserved by running work; a retry succeeds when that has ended."""

    code = "tokens_reserved"
    retry_after_s = 5
    is_worth_retrying = True


class QuotaExceeded(AppError):
    """A limit is reached that a retry does not lift; clients are asked not to retry."""

    status = 429
    type = "insufficient_quota"
    code = "quota_exceeded"
    is_final = True


class Unavailable(AppError):
    """A part that the service needs, such as the database, does not answer at the moment."""

    status = 503
    type = "server_error"
    code = "unavailable"
    retry_after_s = 1


class Unfit(AppError):
    """The settings or the environment do not allow the service to start."""

    status = 503
    code = "not_ready"
