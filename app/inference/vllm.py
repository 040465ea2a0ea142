"""Serve from the provider's vLLM server: send it token ids, load adapters by name, and prove each load.

Prompts are rendered here with the model's own chat template, as in training and audit; control tokens inside texts stay
text. The server's answers to probes are compared with those of an embedded engine, which loads the same signed bytes on
this machine: when an adapter is loaded, after each further load, and regularly while it serves.

Withdrawn adapters are unloaded: those that a transaction has withdrawn, and those that expired.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from functools import partial
from itertools import count

from anyio import to_thread
from openai import APIConnectionError, APIStatusError, AsyncOpenAI, NotFoundError

from app.db import Begin
from app.errors import AppError
from app.inference.clients import Clients
from app.inference.embedded import EmbeddedEngines
from app.inference.engine_process import Stream
from app.inference.protocol import Ask, Proof, busy, engine_lost
from app.inference.released import NotServed, ReleasedModel
from app.inference.vllm_adapters import Adapters
from app.inference.vllm_probe import probes
from app.inference.vllm_server import Gate, NotServable, Server, ask_server, require_whole
from app.inference.vllm_writing import (
    ReplyBounds,
    Request,
    base_tokenizer,
    prompt_ids,
    refuse_unenforced,
    reply_room,
    spell,
    translate,
    write,
)
from app.jobs.project_models import own_model
from app.objects import served_adapters
from app.settings import Settings
from app.storage import Storage

log = logging.getLogger(__name__)
_SCHEMAS = 256  # accepted schemas that are remembered
_TRIES = 3  # to load an adapter that other requests evict at the same time
_ASK_AGAIN_S = 60.0  # then ask for version and models again: the server may have restarted with other limits
_WITHDRAWAL_LOOK_S = 1.0


class Vllm:
    """Implements `Engines` with the server of `SPARD_SERVING_URL`, which serves base models under their aliases.

    `prover` is the embedded engine that the server's answers are compared with.
    """

    def __init__(
        self, settings: Settings, storage: Storage, prover: EmbeddedEngines, clients: Clients, begin: Begin
    ) -> None:
        self._settings, self._prover, self._clients, self._begin = settings, prover, clients, begin
        self._gate = Gate(settings.serving_adapters_dir)
        self.adapters = Adapters(settings, storage, prover, self._gate, begin, self._end_streams)
        self._schemas: OrderedDict[str, None] = OrderedDict()  # schemas that the prover has accepted
        self._numbers = count(1)
        self._running: dict[int, asyncio.Task[None]] = {}
        self._streams: dict[int, tuple[str, Stream]] = {}
        self._server: Server | None = None
        self._asked_at = 0.0
        self._canary: asyncio.Task[None] | None = None

    async def start(self, model: ReleasedModel, project: str, ask: Ask) -> tuple[Stream, int, Proof | None]:
        """Return the replies' stream, the prompt's number of tokens, and a proof if this request loaded the adapter."""
        require_whole(model)
        tokenizer = await to_thread.run_sync(base_tokenizer, model)
        async with self._client() as client:
            server = await self._ask_server(client)
            context = server.context(model.base)
            if model.adapter and (why := server.refuse_adapters()):
                raise NotServable(why)
            await self._check_schema(model, ask)
            proof = None
            for _ in range(_TRIES):
                resident, is_new = await self.adapters.provide(client, model, project, tokenizer)
                proof = resident.proof if is_new else proof
                ids = await to_thread.run_sync(prompt_ids, tokenizer, ask, resident.mode)
                bounds, room = ReplyBounds.from_ask(tokenizer, ask), reply_room(ids, ask, context)
                await self._gate.enter()
                if self.adapters.residents.get(resident.name) is resident:
                    break
                self._gate.leave()  # the adapter was evicted while this request waited for the gate
            else:
                raise busy("Too many adapters are asked for at the moment.")
        stream = Stream(next(self._numbers), self._cancel)
        salt = resident.cache_salt(project)
        request = Request(stream.number, resident.name, ids, bounds, ask, room, partial(spell, tokenizer), salt)
        resident.is_used = True
        self._streams[stream.number] = resident.name, stream
        self._running[stream.number] = task = asyncio.create_task(self._write(stream, request))
        task.add_done_callback(lambda _: self._end(stream.number))
        self._watch()
        return stream, len(ids), proof

    def pids(self) -> list[int]:
        """Return an empty list: the server is not a local process."""
        return []

    def close(self) -> None:
        """End the prover and the regular checks."""
        if self._canary is not None:
            with suppress(RuntimeError):  # its loop is closed
                self._canary.cancel()
        self._prover.close()

    async def unload_withdrawn(self) -> None:
        """Make the server unload the adapters of withdrawn models, and remove their files."""
        for digest in await to_thread.run_sync(withdrawn_digests, self._begin, str(self._settings.serving_url)):
            async with self._client() as client:
                await self.adapters.unload(client, digest)
            await to_thread.run_sync(drop_served_row, self._begin, str(self._settings.serving_url), digest)

    async def _check_schema(self, model: ReleasedModel, ask: Ask) -> None:
        """Refuse a schema that the embedded engine or the server cannot constrain a reply to.

        vLLM ignores some such schemas, in part or whole, and says nothing.
        """
        if ask["json_schema"] is None:
            return
        refuse_unenforced(ask["json_schema"])
        key = json.dumps([model.base, ask["json_schema"]])
        if key not in self._schemas:
            first: Ask = {**probes()[0], "json_schema": ask["json_schema"], "top_logprobs": None}
            stream, _, _ = await self._prover.start(replace(model, name=model.base, archive=None), "prover", first)
            stream.cancel()
            self._schemas[key] = None
            if len(self._schemas) > _SCHEMAS:
                self._schemas.popitem(last=False)

    async def _ask_server(self, client: AsyncOpenAI) -> Server:
        if self._server is None or time.monotonic() - self._asked_at > _ASK_AGAIN_S:
            self._server, self._asked_at = await ask_server(client), time.monotonic()
        return self._server

    def _forget_server(self) -> None:
        self._server = None
        self.adapters.reset()

    async def _write(self, stream: Stream, request: Request) -> None:
        """Forward the server's chunks to the stream; an error ends the stream."""
        try:
            async with self._client() as client:
                async for said in write(client, request):
                    stream.put(said)
        except APIStatusError as error:
            if error.status_code == NotFoundError.status_code:  # the server has restarted and lost its adapters
                self.adapters.forget(request.name)
                self._forget_server()
            log.warning("the server answers %d: %s", error.status_code, error.message[:300])
            stream.put(translate(error))
        except APIConnectionError:
            self._forget_server()
            stream.put(engine_lost())
        except AppError as error:
            stream.put(error)

    def _end(self, number: int) -> None:
        """Leave the gate, so that adapters can be loaded; it is called at the end of every request, failed ones too."""
        self._gate.leave()
        self._running.pop(number, None)
        self._streams.pop(number, None)

    def _watch(self) -> None:
        """Start the regular checks of the server's adapters, if they do not run."""
        if self._canary is None or self._canary.done():
            self._canary = asyncio.create_task(self._look_again())

    async def _look_again(self) -> None:
        while any(each.is_used for each in self.adapters.residents.values()) or self._running:
            await asyncio.sleep(self._settings.serving_canary_s)
            try:
                async with self._client() as client, self._gate.share():
                    await self.adapters.prove_again(client)
            except Exception:  # this task is the only one that checks, so it must go on
                log.exception("what the server answers with cannot be looked at")

    def _end_streams(self, name: str, error: AppError) -> None:
        """End the replies that a model is writing: its probe has found other weights, or got no answer."""
        if isinstance(error, NotServed):
            error = NotServed("The server answered with other weights than were proved; try again.")
        for model, stream in list(self._streams.values()):
            if model == name:
                stream.put(error)
                stream.cancel()

    def _client(self) -> AbstractAsyncContextManager[AsyncOpenAI]:
        key = self._settings.serving_api_key
        return self._clients.open_client(str(self._settings.serving_url), key.get_secret_value() if key else "none")

    def _cancel(self, number: int) -> None:
        task = self._running.pop(number, None)
        if task:
            task.cancel()


async def unload_withdrawn(unload: Callable[[], Awaitable[None]]) -> None:
    """Call `unload` every second until cancelled; log its errors and go on."""
    while True:
        await asyncio.sleep(_WITHDRAWAL_LOOK_S)
        try:
            await unload()
        except Exception:  # the server or the database may be away; this task is the only one, so it must go on
            log.exception("adapters of withdrawn models are not unloaded yet; trying again")


def withdrawn_digests(begin: Begin, server: str) -> list[str]:
    """Return the digests of adapters that a server holds and that are no longer released.

    Adapters whose release ended without a transaction, as an expired waiver, are marked as withdrawn here first.
    """
    with begin() as session:
        for row in served_adapters.list_adapters(session, server, is_condemned=False):
            own = own_model(session, row.project_id, row.model)
            if own is None or own.adapter is None or own.adapter["sha256"] != row.sha256:
                served_adapters.condemn_job(session, row.job_id, row.sha256)
        session.flush()
        return [row.sha256 for row in served_adapters.list_adapters(session, server, is_condemned=True)]


def drop_served_row(begin: Begin, server: str, digest: str) -> None:
    """Delete the row that says that a server holds an adapter."""
    with begin() as session:
        served_adapters.drop_row(session, server, digest)
