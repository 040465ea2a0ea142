"""Everything that the service raises on purpose: a message a stranger can act on, and the HTTP status it becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spard.errors import UserError


class AppError(UserError):
    """Base of all, in the words of OpenAI's error envelope; subclasses set the defaults."""

    status = 400
    type = "invalid_request_error"
    code: str | None = None
    retry_after_s: int | None = None
    is_final = False  # the same request will not do better in a while
    is_worth_retrying = False  # clients that look at `x-should-retry` are told to try again

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
    """The thing exists, but not in a state that allows this. Never a 409: clients retry that."""

    code = "invalid_state"


class Unauthorized(AppError):
    """No key, or a key that is not ours or no longer is."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(AppError):
    """The key is good, but its scopes do not include this."""

    status = 403
    type = "permission_error"
    code = "insufficient_scope"


class NotFound(AppError):
    """Unknown, or not the caller's: the two read alike."""

    status = 404
    code = "not_found"


class HasNone(NotFound):
    """What was named is the caller's own, and has not what was asked for: no guess at an id."""


class Conflict(AppError):
    """Another request changed the same thing at this moment; clients try again, and find what it made."""

    status = 409
    code = "conflict"


class Stalled(AppError):
    """The body came too slowly; nothing of it was kept."""

    status = 408
    code = "request_timeout"


class TooLarge(AppError):
    """The body is over the limit; nothing of it was kept."""

    status = 413
    code = "file_too_large"


class UnsupportedMedia(AppError):
    """The request's content type or encoding is not read here."""

    status = 415
    code = "unsupported_content_type"


class TooManyRequests(AppError):
    """A limit of this key or project is reached."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retry_after_s = 1


class Reserved(TooManyRequests):
    """What is left of a limit is reserved by work that runs; it helps to wait until that has ended."""

    code = "tokens_reserved"
    retry_after_s = 5
    is_worth_retrying = True


class QuotaExceeded(AppError):
    """A limit that no waiting helps against; clients are told not to try again."""

    status = 429
    type = "insufficient_quota"
    code = "quota_exceeded"
    is_final = True


class Unavailable(AppError):
    """Something that this service needs does not answer at the moment."""

    status = 503
    type = "server_error"
    code = "unavailable"
    retry_after_s = 1


class Unfit(AppError):
    """The settings or the surroundings are not such that the service could start."""

    status = 503
    code = "not_ready"
