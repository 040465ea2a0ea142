"""Render a prompt to token ids, send the request to a vLLM server, and convert its chunks to engine messages.

Prompts are rendered with the model's chat template, which also tells where its replies end.

Schemas are refused of which the server's default engine for schemas, xgrammar, enforces only a part. xgrammar follows
one of `$ref`, `enum`, `anyOf` and `oneOf` and ignores what stands beside it. It also ignores `allOf` of several
schemas, a bound without a `type`, keys of `required` without a schema, a `pattern` beside `format`, and conditions:
`not`, `if`, `dependentRequired` and `dependentSchemas` (measured on versions 0.2.8 and 0.2.9; vLLM 0.32 passes
them on). It takes a `pattern` for the whole text, where JSON Schema looks for it anywhere in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from openai import APIStatusError, AsyncOpenAI

from app.db.tables import BaseModelEntry
from app.errors import AppError, InvalidRequest, TooManyRequests
from app.files.tokenizer import LightTokenizer, open_tokenizer
from app.inference.protocol import Alternative, Ask, EngineMessage, Finish, Token, engine_lost
from app.inference.released import ReleasedModel
from spard.data.chat import get_renderer, render_conversation
from spard.data.control_tokens import Shield, pieces
from spard.data.rendering import Mode, Opening
from spard.data.rows import example
from spard.errors import SpardError

_HALF = "\ufffd"
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")  # a byte-fallback token, as in Llama 2's tokenizer
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_PATTERN_PARTS = re.compile(r"(?s)\\.|\[(?:\\.|[^\]\\])*\]|.")  # an escape, a character class or one character
_CONDITIONS = ("not", "if", "dependentRequired", "dependentSchemas")
_LEADING = ("$ref", "enum", "anyOf", "oneOf", "allOf")
_BOUNDS = (
    *("pattern", "format", "minLength", "maxLength", "minItems", "maxItems"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
_OTHERS = ("properties", "required", "patternProperties", "additionalProperties", "items", "prefixItems")
_GREEDY = 1e-5  # a lower temperature is greedy, in the server and in the embedded engine
_LEAST = -9999.0  # the least log probability, as in OpenAI's API
# Without these, vLLM takes them from the base model's generation_config.json, which audits do not use.
PLAIN = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}


@dataclass(frozen=True, slots=True)
class ReplyBounds:
    """Where a reply ends and begins: the token ids that end it, and the template's text before its first word."""

    ends: list[int]
    opening: str

    @classmethod
    def from_ask(cls, tokenizer: LightTokenizer, ask: Ask) -> ReplyBounds:
        """Return the bounds of the replies to a request."""
        renderer = get_renderer(tokenizer)
        ends = renderer.ends_with_tools if ask["tools"] else renderer.ends
        return cls(sorted(ends), "" if ask["messages"] is None else renderer.opening)


def base_tokenizer(model: ReleasedModel) -> LightTokenizer:
    """Return the tokenizer of a model's base model; raise `InvalidState` if its files are not on this machine."""
    rendering = {"arguments": json.loads(model.template_arguments)}
    entry = BaseModelEntry(alias=model.base, source=model.source, revision=model.revision, rendering=rendering)
    return open_tokenizer(entry)


def prompt_ids(tokenizer: LightTokenizer, ask: Ask, mode: Mode | None) -> list[int]:
    """Return a request's prompt as token ids, rendered as by the embedded engine and the audit.

    Raises `InvalidRequest` if the chat template refuses the messages.
    """
    try:
        if ask["messages"] is None:
            ((ids, _),) = pieces(tokenizer, [Shield(tokenizer).mark(ask["prompt"] or "")])
            return [*tokenizer.start, *ids]
        found = example({"messages": ask["messages"], "tools": ask["tools"]}, 1)
        return render_conversation(tokenizer, found.messages, None, found.tools, mode=mode)
    except (SpardError, ValueError, TypeError) as error:
        message = f"The model's chat template refuses these messages: {str(error)[:300]}"
        raise InvalidRequest(message, code="invalid_messages", param="messages") from None


def spell(tokenizer: LightTokenizer, token_id: int) -> tuple[str, list[int]]:
    """Return a token's text and bytes, which are not valid UTF-8 if the token is only a part of a character."""
    text = tokenizer.piece(token_id)
    name = tokenizer.token_name(token_id) if _HALF in text else ""
    if byte := _FALLBACK.fullmatch(name):
        return text, [int(byte[1], 16)]
    letters = _bytes_of_letters()
    if name and all(letter in letters for letter in name):
        return text, [letters[letter] for letter in name]
    return text, list(text.encode(errors="replace"))


@cache
def _bytes_of_letters() -> dict[str, int]:
    """Return GPT-2's mapping from the characters of a byte-level vocabulary to bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def refuse_unenforced(schema: dict[str, object]) -> None:
    """Raise `InvalidRequest` if xgrammar would ignore a part of the schema.

    It is raised as well if the schema sets options of llguidance, some servers' engine: they can turn keywords off.
    """
    if "x-guidance" in schema:
        message = "`x-guidance` is no keyword of JSON Schema; leave it out."
        raise InvalidRequest(message, code="invalid_json_schema", param="response_format")
    for part in _subschemas(schema):
        if why := _find_ignored(part):
            message = f"The server would ignore a part of this schema: {why}."
            raise InvalidRequest(message, code="invalid_json_schema", param="response_format")


def _subschemas(schema: dict[str, object]) -> Iterator[dict[str, object]]:
    """Yield the schema and every schema in it, but no object that is a value, as in `enum` or `examples`."""
    yield schema
    inner: list[object] = [schema.get(name) for name in _SINGLE]
    for name in _MAPS:
        named = schema.get(name)
        inner += named.values() if isinstance(named, dict) else []
    for name in _LISTS:
        listed = schema.get(name)
        inner += listed if isinstance(listed, list) else []
    for each in inner:
        if isinstance(each, dict):
            yield from _subschemas(each)


def _find_ignored(part: dict[str, object]) -> str | None:
    """Return what the server would ignore in one schema and the way around it; None if it enforces all of it."""
    leading = [name for name in _LEADING if name in part]
    bounds = [name for name in _BOUNDS if name in part]
    all_of, required, properties = part.get("allOf"), part.get("required"), part.get("properties")
    if isinstance(all_of, list) and len(all_of) > 1:
        return "`allOf` of several schemas; merge them into one"
    if condition := next((name for name in _CONDITIONS if name in part), None):
        return f"`{condition}`; leave it out, and check replies for it"
    if leading and (beside := [*leading[1:], *bounds, *(name for name in _OTHERS if name in part)]):
        return f"`{beside[0]}` beside `{leading[0]}`; merge the two"
    if bounds and "type" not in part and "const" not in part:
        return f"`{bounds[0]}` without a `type`"
    if "pattern" in part and "format" in part:
        return "`pattern` beside `format`; keep one of them"
    if open_pattern := next(_find_open_patterns(part), None):
        closing = "begin it with `^`, end it with `$`, and write `.*` where more may stand"
        return f"that {open_pattern!r} may match a part of a text; {closing}"
    named = properties if isinstance(properties, dict) else {}
    if isinstance(required, list) and (missing := [each for each in required if str(each) not in named]):
        return f"{missing[0]!r} in `required`, which is not in `properties`"
    return None


def _find_open_patterns(part: dict[str, object]) -> Iterator[str]:
    """Yield the patterns of one schema that may match a part of a text."""
    by_name, of_names = part.get("patternProperties"), part.get("propertyNames")
    patterns = [part.get("pattern"), *(by_name if isinstance(by_name, dict) else ())]
    patterns += [of_names.get("pattern")] if isinstance(of_names, dict) else []
    for pattern in patterns:
        if isinstance(pattern, str) and not _covers_text(pattern):
            yield pattern


def _covers_text(pattern: str) -> bool:
    """Whether a pattern begins with `^`, ends with `$`, and neither belongs to one alternative only, as in `^a|b$`."""
    parts, depth = _PATTERN_PARTS.findall(pattern), 0
    for part in parts:
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            return False
    return len(parts) > 1 and parts[0] == "^" and parts[-1] == "$"


@dataclass(frozen=True, slots=True)
class Request:
    """A request to one model of the server.

    number      of the stream
    name        the model's name in the server
    ids         the prompt as token ids
    max_tokens  of each reply, within the context length
    spell       returns the text and the bytes of a token id
    cache_salt  requests with another one share no computed prompts with it
    """

    number: int
    name: str
    ids: list[int]
    bounds: ReplyBounds
    ask: Ask
    max_tokens: int
    spell: Callable[[int], tuple[str, list[int]]]
    cache_salt: str

    @property
    def copies(self) -> int:
        """How many copies of one reply are returned: vLLM refuses n > 1 with greedy decoding, where all are equal."""
        return self.ask["n"] if self.ask["temperature"] < _GREEDY else 1


def reply_room(ids: list[int], ask: Ask, context: int) -> int:
    """Return how many tokens a reply may have; raise `InvalidRequest` if the prompt fills the context length."""
    if len(ids) >= context:
        message = f"This model's maximum context length is {context} tokens. Your messages resulted in {len(ids)}"
        raise InvalidRequest(
            f"{message} tokens. Please reduce the length of the messages.",
            code="context_length_exceeded",
            param="messages",
        )
    room = context - len(ids)
    return room if ask["max_tokens"] is None else min(room, ask["max_tokens"])


async def write(client: AsyncOpenAI, request: Request) -> AsyncIterator[EngineMessage]:
    """Yield the `piece` messages of the replies and then `done`, as the embedded engine sends them.

    Errors of the openai client pass through; `translate` turns them into API errors.
    """
    ask = request.ask
    chunks: Any = await client.completions.create(
        model=request.name,
        prompt=request.ids,
        stream=True,
        n=1 if request.copies > 1 else ask["n"],
        max_tokens=request.max_tokens,
        temperature=ask["temperature"],
        top_p=ask["top_p"],
        presence_penalty=ask["presence_penalty"],
        frequency_penalty=ask["frequency_penalty"],
        seed=ask["seed"],
        stop=ask["stop"] or None,
        logprobs=ask["top_logprobs"],
        extra_body=_body(request),
    )
    counts, openings = [0] * ask["n"], [Opening(request.bounds.opening) for _ in range(ask["n"])]
    async for chunk in chunks:
        for choice in chunk.choices:
            tokens, count = _tokens(choice, request)
            text = openings[choice.index].cut(choice.text, is_last=bool(choice.finish_reason))
            for index in range(request.copies) if request.copies > 1 else (choice.index,):
                counts[index] += count
                piece: EngineMessage = {"kind": "piece", "id": request.number, "index": index, "text": text}
                piece["finish"], piece["tokens"] = _finish(choice.finish_reason), tokens
                piece["reply_tokens"] = counts[index]
                yield piece
    yield {"kind": "done", "id": request.number, "reply_tokens": sum(counts)}


def translate(error: APIStatusError) -> AppError:
    """Return the API error for a server's error status."""
    if error.status_code == 429:
        return TooManyRequests("Too many replies are being written at the moment.", code="engine_overloaded")
    if error.status_code in (400, 413, 422):
        if "context length" in error.message or "max_model_len" in error.message:
            message = "The prompt is longer than the model's context. Please reduce its length."
            return InvalidRequest(message, code="context_length_exceeded", param="messages")
        words = f"The server that answers for this model refuses the request: {error.message[:300]}"
        return InvalidRequest(words, code="invalid_value")
    return engine_lost()


def completion_tokens(logprobs: object, most: int | None = None) -> list[Token]:
    """Return a chunk's tokens in the engines' format, each with its `most` likeliest alternatives."""
    names, values = getattr(logprobs, "tokens", None) or [], getattr(logprobs, "token_logprobs", None) or []
    tops = getattr(logprobs, "top_logprobs", None) or [{}] * len(names)
    return [
        {
            "token": name,
            "logprob": value,
            "bytes": list(name.encode()),
            "top_logprobs": [
                {"token": t, "logprob": x, "bytes": list(t.encode())}
                for t, x in sorted((top or {}).items(), key=lambda each: -each[1])[:most]
            ],
        }
        for name, value, top in zip(names, values, tops, strict=True)
    ]


def _body(request: Request) -> dict[str, object]:
    """Return the fields of the request that are vLLM's own."""
    ask = request.ask
    body: dict[str, object] = {
        **PLAIN,
        "cache_salt": request.cache_salt,
        "stop_token_ids": request.bounds.ends,
        "skip_special_tokens": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # keyed by text, one of two tokens with the same text gets lost
    }
    if ask["json_schema"] is not None:
        form = {"name": "reply", "schema": ask["json_schema"]}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    return body


def _tokens(choice: Any, request: Request) -> tuple[list[Token], int]:
    """Return a chunk's tokens with logprobs, and its number of tokens, both without the token that ends the reply."""
    ask, ids = request.ask, getattr(choice, "token_ids", None)
    tokens = completion_tokens(choice.logprobs, ask["top_logprobs"]) if choice.logprobs else []
    if not ask["as_ids"]:
        tokens = [_with_texts(each, request) for each in tokens]
    count = max(1 if choice.text else 0, len(tokens)) if ids is None else len(ids)
    by_token = choice.finish_reason == "stop" and not isinstance(getattr(choice, "stop_reason", None), str)
    if by_token and count:
        return tokens[: count - 1], count - 1
    return tokens, count


def _with_texts(token: Token, request: Request) -> Token:
    tops = [_alternative(each, request) for each in token["top_logprobs"]]
    return {**_alternative(token, request), "top_logprobs": tops}


def _alternative(told: Alternative, request: Request) -> Alternative:
    text, octets = request.spell(int(told["token"].removeprefix("token_id:")))
    return {"token": text, "logprob": max(told["logprob"], _LEAST), "bytes": octets}


def _finish(reason: str | None) -> Finish | None:
    match reason:
        case None | "":
            return None
        case "length" | "stop":
            return reason
        case _:  # such as `abort`: the reply may be incomplete
            raise engine_lost()
