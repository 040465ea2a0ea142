"""Translate pydantic's errors about a request into one error in the words of the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from app.errors import AppError, InvalidRequest
from app.http.schemas import Refusal

Ask = TypeVar("Ask", bound=BaseModel)

_CODES = {
    "extra_forbidden": "extra_forbidden",
    "unexpected_keyword_argument": "extra_forbidden",
    "missing": "missing_field",
    "greater_than": "out_of_range",
    "greater_than_equal": "out_of_range",
    "less_than": "out_of_range",
    "less_than_equal": "out_of_range",
    "too_long": "too_long",
    "string_too_long": "too_long",
    "string_pattern_mismatch": "invalid_value",
    "json_invalid": "invalid_json",
    "union_tag_invalid": "not_allowed",
    "literal_error": "not_allowed",
}


# Replacements for messages in Python's terms.
_PLAIN = {
    "int_parsing": "Input should be a valid integer.",
    "float_parsing": "Input should be a valid number.",
    "tuple_type": "Input should be a valid list.",
    "none_required": "Input should be null.",
}
_OTHER_TYPE = ("_type", "_parsing", "literal_error")  # endings of errors from a union's other branches
_OBJECTS = ("dataclass_type", "dict_type", "model_attributes_type", "model_type")
_NO_BODY = "Send a JSON object with Content-Type: application/json."
_BOUNDS = {"ge", "gt", "le", "lt"}


class Fault(TypedDict):
    """One fault of a request; `bound` maps `ge`, `gt`, `le` or `lt` to the bound that a number violates."""

    param: str | None
    code: str
    message: str
    bound: NotRequired[dict[str, float]]


def first_fault(exc: RequestValidationError) -> AppError:
    """Return the error for an invalid request: its message is about the first fault, `details` lists all."""
    found: dict[str | None, tuple[bool, Fault]] = {}  # by param, and whether the value has an expected type
    for error in exc.errors():
        fault, is_of_type = _fault(error, exc.body), not error["type"].endswith(_OTHER_TYPE)
        # pydantic reports an error for each branch of a union; of several for one field, the one of the right type
        # stays.
        known = found.get(fault["param"])
        if known is None or (is_of_type and not known[0]):
            found[fault["param"]] = is_of_type, fault
        elif error["type"] == "literal_error" and not known[0]:
            known[1]["message"] = f"{known[1]['message'].removesuffix('.')}, or {_expected_values(error)}."
    faults = [fault for _, fault in found.values()]
    first = next(fault for fault in faults if not _is_of_another_branch(fault, list(found)))
    message = f"{first['param']}: {first['message']}" if first["param"] else first["message"]
    return InvalidRequest(message, code=first["code"], param=first["param"], details=faults)


def read(kind: type[Ask], body: Mapping[str, object]) -> Ask:
    """Validate a request that did not arrive as a JSON body; raise the same error as for one that did."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        faults = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise first_fault(RequestValidationError(faults, body=body)) from None


def _fault(error: ErrorDetails, body: Any) -> Fault:
    """Describe one fault; a `Refusal` raised by a validator has its own code."""
    cause = error.get("ctx", {}).get("error")
    code = getattr(cause, "code", None) or _CODES.get(error["type"], "invalid_type")
    place, *path = error["loc"]
    if place == "body":
        path = _in_body(path, body, error["type"])
    # A validator of a whole object names the field itself.
    path += [cause.param] if isinstance(cause, Refusal) and cause.param else []
    is_no_object = place == "body" and not path and error["type"] in ("missing", *_OBJECTS)
    text = _NO_BODY if is_no_object else _text(error, code, cause)
    fault: Fault = {"param": ".".join(map(str, path)) or None, "code": code, "message": text}
    # A validator of ours may refuse with the same code; its context has no bound.
    bound = {name: error["ctx"][name] for name in _BOUNDS & error.get("ctx", {}).keys()}
    return fault | {"bound": bound} if bound else fault


def _expected_values(error: ErrorDetails) -> str:
    """Return the values that a literal allows, in JSON's spelling."""
    return str(error["ctx"]["expected"]).replace("False", "false").replace("True", "true")


def _text(error: ErrorDetails, code: str, cause: Exception | None) -> str:
    """Return the message for a fault, without terms of the implementation."""
    if error["type"] in _PLAIN:
        return _PLAIN[error["type"]]
    if error["type"] == "literal_error":
        return f"Input should be {_expected_values(error)}."
    if code == "extra_forbidden":
        return "This field is unknown."
    if error["type"] == "union_tag_invalid":
        return f"{error['ctx']['tag']!r} is not available; allowed: {error['ctx']['expected_tags']}."
    if error["type"] in _OBJECTS:
        return "Input should be an object."
    if error["type"] == "string_pattern_mismatch":
        return pattern_hint(error["ctx"]["pattern"])
    if error["type"] == "too_long":
        return f"At most {error['ctx']['max_length']} items are allowed."
    return str(cause) if cause else f"{error['msg'].replace(' after validation', '')}."


def _is_of_another_branch(fault: Fault, params: list[str | None]) -> bool:
    """Return True if the client meant another type of a union, because a fault inside the value is more specific."""
    return fault["code"] == "invalid_type" and any(param and param.startswith(f"{fault['param']}.") for param in params)


def _in_body(path: list[Any], body: Any, kind: str) -> list[Any]:
    """Keep only keys that the client wrote: pydantic's path also names the branches of unions."""
    found: list[Any] = []
    for part in path:
        if (isinstance(body, dict) and part in body) or (isinstance(body, list) and isinstance(part, int)):
            body = body[part]
            found.append(part)
        elif kind == "missing" and part == path[-1]:
            found.append(part)
    return found


# Describe the patterns of fields and parameters in words, so that clients need not read regular expressions.

_ID = "letters, digits, '_' and '-', 64 at most"

ALLOWED = {
    r"^[\x20-\x7e]{1,64}$": "letters without accents, digits, spaces and punctuation of ASCII, 1 to 64 of them",
    r"^[\x21-\x7e]{1,255}$": "letters without accents, digits and punctuation of ASCII, no spaces, 1 to 255 of them",
    r"^[!-~]([ -~]{0,126}[!-~])?$": "letters without accents, digits, punctuation of ASCII, and spaces but at the ends,"
    " 1 to 128 of them",
    r"^[A-Za-z0-9_-]{1,64}$": f"at least one character of {_ID}",
    r"^[A-Za-z0-9_-]{0,64}$": f"nothing, or {_ID}",
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$": "a letter or digit, then letters, digits, '.', '_' and '-', 64 at most",
    r"^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$": "letters, digits, '.', '_' and '-', in parts with '/' between them",
    r"^[A-Za-z0-9][A-Za-z0-9.+-]{0,63}/[A-Za-z0-9][A-Za-z0-9.+-]{0,63}$": "a MIME type, such as text/jsonl",
    r"^https?://[^\s]{1,500}$": "an address that begins with http:// or https://, without spaces, up to 500 characters",
    r"^[0-9a-f]{40}$": "the 40 digits of a commit, 0 to 9 and a to f",
    r"^sha256:[0-9a-f]{64}$": "sha256: and 64 digits, 0 to 9 and a to f, as spard check-model --json prints it",
    r"^reply_[0-9a-f]{1,64}$": "reply_ and up to 64 digits, 0 to 9 and a to f",
    r"^[0-9a-fA-F]{32}$": "the 32 digits of an MD5 sum, 0 to 9 and a to f",
    r"^[A-Za-z_][A-Za-z0-9_.]{0,127}$": "the name of a module, such as q_proj, or the end of its path: mlp.down_proj",
    r"^[a-z_-]{1,64}$": "lower-case letters, '_' and '-', 1 to 64 of them",
    r"^[a-z_]+\.[a-z_]+$": "the name of an action, such as job.created",
    r"^([a-z_]+\.[a-z_]+)?$": "nothing, or the name of an action, such as job.created",
}


def pattern_hint(pattern: str) -> str:
    """Return the error text for a value that does not match the pattern."""
    words = ALLOWED.get(pattern)
    return f"Allowed: {words}." if words else "This text has a form that is not allowed."
