"""The API errors for requests that an engine refuses or cannot finish."""

from __future__ import annotations

from app.errors import AppError, InvalidRequest, InvalidState, TooManyRequests, Unavailable
from app.inference.protocol import BASE_MODEL_CHANGED, Said

# Engines name fields as chat completions do; other endpoints have other names for them.
_FIELDS = {
    "completions": {"messages": "prompt"},
    "responses": {"messages": "input", "response_format": "text.format"},
}


def name_field(error: AppError, endpoint: str) -> None:
    """Rename an error's `param` to the field's name at this endpoint."""
    if error.param is not None:
        error.param = _FIELDS.get(endpoint, {}).get(error.param, error.param)


def engine_lost() -> Unavailable:
    """Return the error for a reply whose engine has ended."""
    return Unavailable("The engine that serves this model has ended; try again.", code="engine_lost")


def engine_stalled() -> Unavailable:
    """Return the error for a reply whose engine was killed because it hung."""
    message = "The engine that serves this model stalled and was stopped; it is being restarted. Try again."
    return Unavailable(message, code="engine_stalled")


def busy(message: str) -> TooManyRequests:
    """Return a 429 error, with a retry after 15 s, for a request that there is no room for now."""
    error = TooManyRequests(message, code="engine_busy")
    error.retry_after_s = 15
    return error


def base_model_changed() -> InvalidState:
    """Return the error for a base model whose files have changed since it was added."""
    return InvalidState(BASE_MODEL_CHANGED, code="base_model_changed")


def refusal_error(said: Said) -> AppError:
    """Return the API error for an engine's `failed` message."""
    match said["code"]:
        case "engine_busy":
            return busy(said["message"])
        case "context_length_exceeded":
            return InvalidRequest(said["message"], code="context_length_exceeded", param="messages")
        case "tools_not_rendered":
            return InvalidRequest(said["message"], code="tools_not_rendered", param="tools")
        case "invalid_json_schema":
            return InvalidRequest(said["message"], code="invalid_json_schema", param="response_format")
        case "schema_too_costly":
            return InvalidRequest(said["message"], code="schema_too_costly", param="response_format")
        case "unsupported_parameter":
            return InvalidRequest(said["message"], code="unsupported_parameter", param="response_format")
        case "base_model_changed":
            return base_model_changed()
        case "reply_failed":
            return InvalidState(said["message"], code="reply_failed")
        case _:
            return InvalidRequest(said["message"], code="invalid_messages", param="messages")
