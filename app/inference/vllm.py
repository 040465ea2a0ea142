"""A vLLM server of the provider's as the engine: it gets tokens, loads adapters by name, and each load is proved.

Prompts are rendered here, with the model's own chat template and control tokens in texts as text, as in training and
audit; the server sees token ids. What it answers with an adapter is compared with what an engine of our own answers,
which loads the same signed bytes on this machine: servers that load adapters while they run have answered with another
one's, or with none.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

from anyio import to_thread
from openai import APIConnectionError, APIStatusError, AsyncOpenAI, NotFoundError

from app.errors import AppError, InvalidRequest, TooManyRequests, Unavailable
from app.files.tokenizer import LightTokenizer
from app.inference import archives
from app.inference.archives import NotServed
from app.inference.clients import Clients
from app.inference.embedded import Embedded
from app.inference.engine_errors import engine_lost
from app.inference.engine_process import Stream
from app.inference.protocol import Ask, Proof, Said, Token
from app.inference.released import Released
from app.inference.vllm_probe import KNOWN, Comparison, Likely, first_tokens, probes
from app.inference.vllm_prompts import ReplyBounds, prompt_ids, tokenizer_of
from app.settings import Settings
from app.storage import Storage
from spard.data.opening import Opening
from spard.data.rendering import Mode
from spard.digests import MANIFEST

log = logging.getLogger(__name__)


class Vllm:
    """The server of `SPARD_SERVING_URL`; base models are there under their aliases."""

    def __init__(self, settings: Settings, storage: Storage, prover: Embedded, clients: Clients) -> None:
        self._settings, self._storage, self._prover, self._clients = settings, storage, prover, clients
        self._loads: dict[str, asyncio.Task[Proof]] = {}  # by the adapter's name there, which its digest gives
        self._numbers = count(1)
        self._running: dict[int, asyncio.Task[None]] = {}
        self._modes: dict[str, Mode | None] = {}  # of thinking that adapters were measured in, by their names there

    async def start(self, model: Released, project: str, ask: Ask) -> tuple[Stream, int, Proof | None]:
        """Return the replies' stream and the number of the prompt's tokens; with a proof if the adapter was loaded."""
        tokenizer = await to_thread.run_sync(tokenizer_of, model)
        name, proof = model.base, None
        if model.adapter:
            name = f"spard-{model.adapter[:24]}"
            is_new = name not in self._loads
            loaded = await self._loaded(name, model, tokenizer)
            proof = loaded if is_new else None
        ids = await to_thread.run_sync(prompt_ids, tokenizer, ask, self._modes.get(name))
        stream, bounds = Stream(next(self._numbers), self._cancel), ReplyBounds.of(tokenizer, ask)
        self._running[stream.number] = asyncio.create_task(self._write(stream, name, ids, bounds, ask))
        return stream, len(ids), proof

    def pids(self) -> list[int]:
        """Return nothing: the server is the provider's."""
        return []

    def close(self) -> None:
        """End the engine that proves what the server has loaded."""
        self._prover.close()

    async def _loaded(self, name: str, model: Released, tokenizer: LightTokenizer) -> Proof:
        """Return the proof of an adapter that the server has; one that was not proved is tried at the next request."""
        if name not in self._loads:
            self._loads[name] = asyncio.create_task(self._load(name, model, tokenizer))
        try:
            return await asyncio.shield(self._loads[name])
        except Exception:
            self._loads.pop(name, None)
            raise

    def _forget(self, name: str) -> None:
        """Have an adapter loaded and proved again at the next request; one that is being loaded is left alone."""
        if name in self._loads and self._loads[name].done():
            del self._loads[name]

    async def _load(self, name: str, model: Released, tokenizer: LightTokenizer) -> Proof:
        archive, root = model.archive, self._settings.serving_adapters_dir
        if archive is None or root is None:
            raise Unavailable("SPARD_SERVING_ADAPTERS_DIR names no folder that the server reads.", code="no_engine")
        folder = Path(root) / archive.sha256
        await to_thread.run_sync(partial(archives.fetch, self._storage, self._settings, archive, folder))
        manifest = json.loads((folder / MANIFEST).read_bytes())
        self._modes[name] = (manifest.get("rendering") or {}).get("asked")
        if "system_prompt" in manifest:
            raise NotServed("The adapter is defended by a system prompt, which such a server does not add.")
        async with self._client() as client:
            with suppress(APIStatusError):  # it was not there
                await client.post("/unload_lora_adapter", cast_to=str, body={"lora_name": name})
            try:
                body = {"lora_name": name, "lora_path": str(folder)}
                await client.post("/load_lora_adapter", cast_to=str, body=body)
            except APIStatusError as error:
                raise NotServed(f"The server does not load the adapter: {error.message[:200]}") from None
        return await self._proved(model, name, tokenizer)

    async def _proved(self, model: Released, name: str, tokenizer: LightTokenizer) -> Proof:
        """Raise `NotServed` unless the server's first tokens are those of the adapter, and not of the base model."""
        base, digest, comparison = replace(model, name=model.base, archive=None), "", Comparison()
        for ask in probes():
            own, proof = await self._expected(model, ask)
            without, _ = await self._expected(base, ask)
            digest = proof["tensor_digest"] if proof else digest
            stream = Stream(next(self._numbers), self._cancel)
            ids = prompt_ids(tokenizer, ask, self._modes.get(name))
            task = asyncio.create_task(self._write(stream, name, ids, ReplyBounds.of(tokenizer, ask), ask))
            comparison.add(await first_tokens(stream, self._settings.serving_stall_s), own, without)
            await task
        comparison.check()
        return {
            "tensor_digest": digest,
            "max_difference": comparison.to_adapter,
            "difference_to_base": comparison.to_base,
        }

    async def _expected(self, model: Released, ask: Ask) -> tuple[Likely, Proof | None]:
        asked: Ask = {**ask, "adapter": model.adapter, "top_logprobs": KNOWN}
        stream, _, proof = await self._prover.start(model, "prover", asked)
        return await first_tokens(stream, self._settings.serving_stall_s), proof

    async def _write(self, stream: Stream, name: str, ids: list[int], bounds: ReplyBounds, ask: Ask) -> None:
        """Pass on what the server says, in the engines' own words."""
        try:
            async with self._client() as client:
                await self._pass_on(client, stream, name, ids, bounds, ask)
        except APIStatusError as error:
            if error.status_code == NotFoundError.status_code:  # it was started anew since, and has no adapters
                self._forget(name)
            stream.put(_translated(error))
        except APIConnectionError:
            stream.put(engine_lost())
        finally:
            self._running.pop(stream.number, None)

    async def _pass_on(
        self, client: AsyncOpenAI, stream: Stream, name: str, ids: list[int], bounds: ReplyBounds, ask: Ask
    ) -> None:
        written, openings = 0, [Opening(bounds.opening) for _ in range(ask["n"])]
        chunks = await client.completions.create(
            model=name,
            prompt=ids,
            stream=True,
            stream_options={"include_usage": True},
            n=ask["n"],
            max_tokens=ask["max_tokens"],
            temperature=ask["temperature"],
            top_p=ask["top_p"],
            presence_penalty=ask["presence_penalty"],
            frequency_penalty=ask["frequency_penalty"],
            seed=ask["seed"],
            stop=ask["stop"] or None,
            logprobs=ask["top_logprobs"],
            extra_body={
                "stop_token_ids": bounds.ends,
                "skip_special_tokens": False,
                "return_tokens_as_token_ids": ask["as_ids"],
                **_form(ask),
            },
        )
        counts = [0] * ask["n"]
        async for chunk in chunks:
            written = chunk.usage.completion_tokens if chunk.usage else written
            for choice in chunk.choices:
                tokens = completion_tokens(choice.logprobs) if choice.logprobs else []
                counts[choice.index] += max(1, len(tokens))
                text = openings[choice.index].cut(choice.text, is_last=bool(choice.finish_reason))
                said: Said = {"kind": "piece", "id": stream.number, "index": choice.index, "text": text}
                said["finish"] = (
                    "length" if choice.finish_reason == "length" else "stop" if choice.finish_reason else None
                )
                said["tokens"], said["reply_tokens"] = tokens, counts[choice.index]
                stream.put(said)
        stream.put({"kind": "done", "id": stream.number, "reply_tokens": written or sum(counts)})

    def _client(self) -> AbstractAsyncContextManager[AsyncOpenAI]:
        key = self._settings.serving_api_key
        return self._clients.of(str(self._settings.serving_url), key.get_secret_value() if key else "none")

    def _cancel(self, number: int) -> None:
        task = self._running.pop(number, None)
        if task:
            task.cancel()


def _form(ask: Ask) -> dict[str, object]:
    """Return the form of the reply in the server's words, which its completions take as its chats do."""
    if ask["json_schema"] is None:
        return {}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "reply", "schema": ask["json_schema"]}}}


def completion_tokens(logprobs: object) -> list[Token]:
    """Return the tokens of a chunk in the engines' own form."""
    names, values = getattr(logprobs, "tokens", None) or [], getattr(logprobs, "token_logprobs", None) or []
    tops = getattr(logprobs, "top_logprobs", None) or [{}] * len(names)
    return [
        {
            "token": name,
            "logprob": value,
            "bytes": list(name.encode()),
            "top_logprobs": [{"token": t, "logprob": x, "bytes": list(t.encode())} for t, x in (top or {}).items()],
        }
        for name, value, top in zip(names, values, tops, strict=True)
    ]


def _translated(error: APIStatusError) -> AppError:
    """Return our error for one of the server's."""
    if error.status_code == 429:
        return TooManyRequests("Too many replies are being written at the moment.", code="engine_overloaded")
    if error.status_code == 400 and "context length" in error.message:
        message = "The prompt is longer than the model's context. Please reduce its length."
        return InvalidRequest(message, code="context_length_exceeded", param="messages")
    log.warning("the server answers %d: %s", error.status_code, error.message[:300])
    return engine_lost()
