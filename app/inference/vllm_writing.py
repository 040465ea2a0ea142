"""Send a request to a vLLM server, and convert its chunks to engine messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from openai import APIStatusError, AsyncOpenAI

from app.errors import AppError, InvalidRequest, TooManyRequests
from app.inference.engine_errors import engine_lost
from app.inference.protocol import Alternative, Ask, Finish, Said, Token
from app.inference.vllm_prompts import ReplyBounds
from spard.data.rendering import Opening

_GREEDY = 1e-5  # a lower temperature is greedy, in the server and in the embedded engine
_LEAST = -9999.0  # the least log probability, as in OpenAI's API
# Without these, vLLM takes them from the base model's generation_config.json, which audits do not use.
PLAIN = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}


@dataclass(frozen=True, slots=True)
class Request:
    """A request to one model of the server.

    number      of the stream
    name        the model's name in the server
    ids         the prompt as token ids
    max_tokens  of each reply, within the context length
    spell       returns the text and the bytes of a token id
    """

    number: int
    name: str
    ids: list[int]
    bounds: ReplyBounds
    ask: Ask
    max_tokens: int
    spell: Callable[[int], tuple[str, list[int]]]

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


async def write(client: AsyncOpenAI, request: Request) -> AsyncIterator[Said]:
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
                piece: Said = {"kind": "piece", "id": request.number, "index": index, "text": text}
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
