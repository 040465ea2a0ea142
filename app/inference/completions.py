"""Build OpenAI's legacy text completion objects from a reply, whole or as a stream of chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal

from pydantic import BaseModel

from app.inference.chat import UsageOut, reply_usage
from app.inference.protocol import Finish, Said, Token
from app.inference.schemas import CompletionCreate
from app.inference.service import Reply


class TextLogprobs(BaseModel):
    """Log probabilities of a reply's tokens; `text_offset` is each token's position in the shown text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(BaseModel):
    """One of the `n` replies."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


class Completion(BaseModel):
    """The continuations of a text."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageOut | None = None
    system_fingerprint: str | None


async def whole(reply: Reply, ask: CompletionCreate) -> Completion:
    """Wait for all replies and return the completion; raise `NotFound` if the model is no longer released by then."""
    texts = [_start(ask)] * (ask.n or 1)
    tokens: list[list[Token]] = [[] for _ in texts]
    ends: list[Finish | None] = [None for _ in texts]
    async for said in reply.pieces():
        index = said["index"]
        texts[index] += said["text"]
        tokens[index] += said.get("tokens", [])
        ends[index] = said["finish"]
    await reply.check()
    found = [
        TextChoice(index=i, text=text, logprobs=_logprobs(ask, tokens[i], len(_start(ask))), finish_reason=ends[i])
        for i, text in enumerate(texts)
    ]
    return _completion(reply, ask, found, reply_usage(reply))


async def chunks(reply: Reply, ask: CompletionCreate) -> AsyncIterator[dict[str, object]]:
    """Yield the chunks of a stream as JSON objects; with `echo` the prompt comes first, and usage last if asked."""
    offsets = [0] * (ask.n or 1)
    if start := _start(ask):
        for index in range(len(offsets)):
            yield _piece(reply, ask, {"index": index, "text": start, "finish": None}, 0)
            offsets[index] = len(start)
    async for said in reply.pieces():
        yield _piece(reply, ask, said, offsets[said["index"]])
        offsets[said["index"]] += len(said["text"])
    if ask.includes_usage:
        yield _completion(reply, ask, [], reply_usage(reply)).model_dump()


def _piece(reply: Reply, ask: CompletionCreate, said: Said, offset: int) -> dict[str, object]:
    logprobs = _logprobs(ask, said.get("tokens", []), offset)
    choice = TextChoice(index=said["index"], text=said["text"], logprobs=logprobs, finish_reason=said["finish"])
    return _completion(reply, ask, [choice], None).model_dump()


def _start(ask: CompletionCreate) -> str:
    return (ask.ask()["prompt"] or "") if ask.echo else ""


def _completion(reply: Reply, ask: CompletionCreate, choices: list[TextChoice], usage: UsageOut | None) -> Completion:
    return Completion(
        id=f"cmpl-{reply.call.id.removeprefix('call_')}",
        created=reply.created,
        model=ask.model,
        choices=choices,
        usage=usage,
        system_fingerprint=reply.fingerprint,
    )


def _logprobs(ask: CompletionCreate, tokens: list[Token], offset: int) -> TextLogprobs | None:
    if ask.logprobs is None:
        return None
    offsets = list[int]()
    for token in tokens:
        offsets.append(offset)
        offset += len(token["token"])
    return TextLogprobs(
        tokens=[each["token"] for each in tokens],
        token_logprobs=[each["logprob"] for each in tokens],
        top_logprobs=[{other["token"]: other["logprob"] for other in each["top_logprobs"]} for each in tokens],
        text_offset=offsets,
    )
