"""Unattested servers: OpenAI-compatible servers, named by the policy, that cannot prove which weights they use.

They render prompts themselves and do not report what they have loaded. So the policy has to name each model that they
may answer for, and each reply is marked as not attested. The model's release is checked as always.
"""

from __future__ import annotations

import asyncio
import json
import logging
from itertools import count
from typing import Any

from openai import APIConnectionError, APIError, APIStatusError

from app.errors import AppError, InvalidRequest, TooManyRequests, Unavailable
from app.inference.clients import NO_KEY, Clients
from app.inference.engine_process import Stream
from app.inference.protocol import Ask, EngineMessage, Finish, Proof, Token
from app.inference.released import ReleasedModel, Server
from app.inference.vllm_writing import completion_tokens
from app.settings import Settings

log = logging.getLogger(__name__)


class UnattestedEngines:
    """Implements `Engines` for all unattested servers; each model names its own server."""

    def __init__(self, settings: Settings, clients: Clients) -> None:
        self._settings, self._clients, self._numbers = settings, clients, count(1)
        self._running: dict[int, asyncio.Task[None]] = {}

    async def start(self, model: ReleasedModel, project: str, ask: Ask) -> tuple[Stream, int, Proof | None]:
        """Start the request and return its stream; the prompt's token count is 0 here, and comes with the end."""
        if model.server is None:
            raise Unavailable("No server is named for this model.", code="no_engine")
        stream = Stream(next(self._numbers), self._cancel)
        self._running[stream.number] = asyncio.create_task(
            self._write(stream, model.server, model.template_arguments, ask)
        )
        return stream, 0, None

    async def unload_withdrawn(self) -> None:
        """Do nothing: these servers hold no adapters for us."""

    def pids(self) -> list[int]:
        """Return an empty list: no local process runs."""
        return []

    def close(self) -> None:
        """Do nothing: no local process runs."""

    async def _write(self, stream: Stream, server: Server, template_arguments: str, ask: Ask) -> None:
        secret = self._settings.policy_key("unattested", server.url) or NO_KEY
        try:
            async with self._clients.open_client(server.url, secret) as client:
                endpoint: Any = client.completions if ask["messages"] is None else client.chat.completions
                chunks = await endpoint.create(**_server_request(server.name, ask, json.loads(template_arguments)))
                written = _ChunkConverter(stream, ask["n"])
                async for chunk in chunks:
                    written.add(chunk)
                written.end()
        except APIStatusError as error:
            stream.put(_translate_error(error))
        except (APIConnectionError, APIError):
            stream.put(_away())
        except Exception:  # the server may answer anything, and the stream has to end in any case
            log.exception("a server that is not attested answers in no form that is known")
            stream.put(_away())
        finally:
            self._running.pop(stream.number, None)

    def _cancel(self, number: int) -> None:
        task = self._running.pop(number, None)
        if task:
            task.cancel()


class _ChunkConverter:
    """Converts a server's chunks to engine messages; tool calls become text, in the form that `Sieve` parses."""

    def __init__(self, stream: Stream, replies: int) -> None:
        self._stream = stream
        self._counts: list[int] = [0] * replies
        self._calls: list[dict[int, list[str]]] = [{} for _ in range(replies)]  # of each reply: name and arguments
        self._usage: Any = None

    def add(self, chunk: Any) -> None:
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices:
            delta = getattr(choice, "delta", None)
            text = str((choice.text if delta is None else delta.content) or "")
            for call in (getattr(delta, "tool_calls", None) or ()) if delta is not None else ():
                name_and_arguments = self._calls[choice.index].setdefault(call.index, ["", ""])
                name_and_arguments[0] += (call.function and call.function.name) or ""
                name_and_arguments[1] += (call.function and call.function.arguments) or ""
            tokens = _tokens(choice)
            self._counts[choice.index] += max(len(tokens), 1 if text else 0)
            if choice.finish_reason:
                text += self._call_text(choice.index)
            if text or tokens or choice.finish_reason:
                self._piece(choice.index, text, tokens, choice.finish_reason)

    def end(self) -> None:
        usage = self._usage
        done: EngineMessage = {"kind": "done", "id": self._stream.number, "reply_tokens": sum(self._counts)}
        if usage is not None:
            done["reply_tokens"], done["prompt_tokens"] = usage.completion_tokens, usage.prompt_tokens
        self._stream.put(done)

    def _piece(self, index: int, text: str, tokens: list[Token], reason: str | None) -> None:
        finish: Finish | None = None
        if reason:
            finish = "length" if reason == "length" else "content_filter" if reason == "content_filter" else "stop"
        said: EngineMessage = {
            "kind": "piece",
            "id": self._stream.number,
            "index": index,
            "text": text,
            "finish": finish,
        }
        said["tokens"], said["reply_tokens"] = tokens, self._counts[index]
        self._stream.put(said)

    def _call_text(self, index: int) -> str:
        calls = [{"name": name, "arguments": arguments} for name, arguments in self._calls[index].values()]
        return "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)


def _server_request(name: str, ask: Ask, template_arguments: dict[str, object]) -> dict[str, object]:
    """Return the request in OpenAI's format.

    Fixed arguments of the chat template are added in the field of vLLM and SGLang.
    """
    asked: dict[str, object] = {
        "model": name,
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": ask["n"],
        "max_tokens": ask["max_tokens"],
        "temperature": ask["temperature"],
        "top_p": ask["top_p"],
        "presence_penalty": ask["presence_penalty"],
        "frequency_penalty": ask["frequency_penalty"],
    }
    if ask["seed"] is not None:
        asked["seed"] = ask["seed"]
    if ask["stop"]:
        asked["stop"] = ask["stop"]
    if ask["messages"] is None:
        return asked | {"prompt": ask["prompt"], "logprobs": ask["top_logprobs"]}
    asked["messages"] = ask["messages"]
    if template_arguments:
        asked["extra_body"] = {"chat_template_kwargs": template_arguments}
    if ask["tools"]:
        asked["tools"] = ask["tools"]
    if ask["json_schema"] is not None:
        asked["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "reply", "schema": ask["json_schema"]},
        }
    if ask["top_logprobs"] is not None:
        asked |= {"logprobs": True, "top_logprobs": ask["top_logprobs"]}
    return asked


def _tokens(choice: Any) -> list[Token]:
    """Return the tokens of a chunk in the engines' format."""
    told = choice.logprobs
    if told is None:
        return []
    if getattr(choice, "delta", None) is not None:
        found: list[Token] = [each.model_dump() for each in told.content or ()]
        return found
    return completion_tokens(told)


def _away() -> Unavailable:
    return Unavailable("The server of this model does not answer; try again.", code="engine_lost")


def _translate_error(error: APIStatusError) -> AppError:
    """Return the API error for a server's error status."""
    if error.status_code == 429:
        return TooManyRequests("Too many replies are being written at the moment.", code="engine_overloaded")
    if error.status_code in (400, 422):
        is_long = getattr(error, "code", None) == "context_length_exceeded"
        said = "The server that answers for this model refuses the request."
        return InvalidRequest(said, code="context_length_exceeded" if is_long else "invalid_messages")
    log.warning("a server that is not attested answers %d: %s", error.status_code, error.message[:300])
    return _away()
