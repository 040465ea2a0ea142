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
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

MAX_LINE = 4 << 20
BASE_MODEL_CHANGED = (
    "The folder of the base model has changed since it was added, so nothing is answered with it: the provider puts "
    "the files back, or adds the model again with `spard models add`."
)

Finish = Literal["stop", "length", "content_filter"]


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


class Said(TypedDict, total=False):
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
