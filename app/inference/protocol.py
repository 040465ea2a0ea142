"""The protocol between an API process and its engine: one JSON object a line, over the engine's standard streams.

to the engine
op        fields
load      adapter, folder, manifest_sha256
generate  id, project, ask (`Ask`)
cancel    id

from the engine
kind      fields
ready     digest of the base model, positions: its context length in tokens
stepped   (none): the loop is alive; sent about once a second, even without requests
loaded    adapter, proof (`Proof`)
refused   adapter, message: the adapter is not the signed one, or its probe failed
absent    id: the request's adapter is not loaded; nothing was generated
started   id, prompt_tokens: the prompt fits, and is being read
piece     id, index, text, tokens (if requested), reply_tokens so far, finish: null, `stop` or `length`
failed    id, code, message
done      id, reply_tokens

The API errors for requests that an engine refuses or cannot finish are made of these messages.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from app.errors import AppError, InvalidRequest, InvalidState, TooManyRequests, Unavailable

MAX_LINE = 4 << 20
BASE_MODEL_CHANGED = (
    "The folder of the base model has changed since it was added, so nothing is answered with it: the provider puts "
    "the files back, or adds the model again with `spard models add`."
)
Finish = Literal["stop", "length", "content_filter"]
# Engines name fields as chat completions do; other endpoints have other names for them.
_FIELDS = {
    "completions": {"messages": "prompt"},
    "responses": {"messages": "input", "response_format": "text.format"},
}


class Message(TypedDict):
    """One turn of a conversation, as chat templates take it."""

    role: str
    content: NotRequired[str | None]
    name: NotRequired[str]
    tool_call_id: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, object]]]


class Ask(TypedDict):
    """A request to an engine. `adapter` is the digest of an archive; None means the base model.

    Exactly one of `messages` (a conversation, rendered with the chat template) and `prompt` (a plain text) is set.
    """

    adapter: str | None
    messages: list[Message] | None
    prompt: str | None
    tools: list[dict[str, object]]
    n: int
    max_tokens: int | None
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: list[str]
    json_schema: dict[str, object] | None  # that the replies are constrained to; None: any text
    top_logprobs: int | None  # alternatives for each token; None: no log probabilities at all
    as_ids: bool  # tokens are returned as ids, as `token_id:7`, because two tokens may have the same text


class Alternative(TypedDict):
    """A possible token at one position, with its log probability in nats."""

    token: str
    logprob: float
    bytes: list[int]


class Token(Alternative):
    """The chosen token at one position, with the likeliest alternatives."""

    top_logprobs: list[Alternative]


class Proof(TypedDict):
    """The result of an adapter's probe; the embedded engine's differences are relative to the largest logit."""

    tensor_digest: str
    max_difference: float  # to the same weights, applied without PEFT
    difference_to_base: float


class EngineMessage(TypedDict, total=False):
    """A message of an engine; `kind` determines its fields."""

    kind: str
    id: int
    digest: str
    positions: int
    adapter: str
    proof: Proof
    message: str
    code: str
    prompt_tokens: int
    reply_tokens: int
    index: int
    text: str
    tokens: list[Token]
    finish: Finish | None


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


def refusal_error(said: EngineMessage) -> AppError:
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
