"""What an API process and its engine tell each other: one JSON object a line, over the engine's standard streams.

to the engine
op        fields
load      adapter, folder, manifest_sha256
generate  id, project, ask (`Ask`)
cancel    id

from it
kind      fields
ready     digest of the base model, positions: tokens that a conversation may have
stepped   (nothing): its loop goes round; told about once a second, also while nobody asks
loaded    adapter, proof (`Proof`)
refused   adapter, message: it is not what was signed, or the probe failed
absent    id: the adapter that it asks for is not loaded; nothing was generated
started   id, prompt_tokens: the prompt fits, and is read now
piece     id, index, text, tokens (where asked for), reply_tokens so far, finish: null, `stop` or `length`
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
    """One turn, in the form that chat templates know."""

    role: str
    content: NotRequired[str | None]
    name: NotRequired[str]
    tool_call_id: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, object]]]


class Ask(TypedDict):
    """What to generate. `adapter` is the digest of an archive; None is the base model.

    Of `messages` and `prompt` one is there: a conversation, rendered with the chat template, or a text to go on with.
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
    json_schema: dict[str, object] | None  # of the reply's form; None: any text
    top_logprobs: int | None  # None: no log probabilities
    as_ids: bool  # tokens are told by their numbers, as `token_id:7`: texts of two may be the same


class Alternative(TypedDict):
    """A token that could have stood at a place, with its log probability in nats."""

    token: str
    logprob: float
    bytes: list[int]


class Token(Alternative):
    """The token that stands there, and the likeliest ones."""

    top_logprobs: list[Alternative]


class Proof(TypedDict):
    """What the probe of an adapter found, as shares of the largest logit."""

    tensor_digest: str
    max_difference: float  # to the same weights, applied without PEFT
    difference_to_base: float


class Said(TypedDict, total=False):
    """A line of the engine's; `kind` says which fields it has."""

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
