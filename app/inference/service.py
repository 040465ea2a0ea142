"""A request for replies from its admission to its end: an engine writes, and a row says what it took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

from anyio import CancelScope, to_thread
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from app import db
from app.audit_log.service import CALLER, Caller
from app.errors import AppError
from app.http.rate_limit import RateLimits
from app.inference import calls
from app.inference.call_leases import CallLeases
from app.inference.calls import Admitted, Outcome, Owner
from app.inference.clients import Clients
from app.inference.engine_errors import engine_lost, name_field
from app.inference.engine_process import Stream
from app.inference.engines import Engines, open_engines
from app.inference.guard import FILTERED, open_guard
from app.inference.protocol import Ask, Proof, Said
from app.inference.released import check_again
from app.inference.watch import Watch
from app.keys.service import Principal
from app.settings import Settings
from app.storage import Storage

CANCELLED = "client_gone"


class Reply:
    """Replies to one request, piece by piece. Close it whatever happens: that is when its row is completed."""

    def __init__(self, serving: Serving, caller: Principal, call: Admitted, stored: asyncio.Task[None]) -> None:
        self._serving, self._caller, self.call, self._stored = serving, caller, call, stored
        self.created = int(time.time())
        self._began, self._stack = time.monotonic(), ExitStack()
        self.outcome = Outcome(CANCELLED)
        self._stream: Stream | None = None
        self._entry = serving.leases.open(call.id)
        self._shown: dict[int, int] = {}  # tokens that were handed on, by the index of the reply
        self._written: dict[int, int] = {}  # tokens, by the index of the reply
        self._is_closed = False
        self._ask: Ask | None = None
        self._guard = open_guard(call.guard, serving.settings, serving.clients)

    @property
    def is_attested(self) -> bool:
        """Whether the engine has proved which weights it answers with."""
        return self.call.model.server is None

    @property
    def fingerprint(self) -> str | None:
        """The digest of the archive that answers; None for a base model."""
        archive = self.call.model.archive
        return f"sha256:{archive.sha256}" if archive else None

    async def begin(self, ask: Ask) -> None:
        """Have an engine read the prompt, unless the guard refuses it; nothing is shown before the row is stored."""
        self._ask = ask
        if self._guard:
            await self._guard.check_input(ask)
        model = self.call.model
        engines = self._serving.engines if self.is_attested else self._serving.unattested_engines
        stream, tokens, proof = await engines.start(model, self._caller.project_id, ask)
        self._stream, self.outcome.prompt_tokens = stream, tokens
        self._entry.note_prompt(tokens)
        self._stack.enter_context(self._serving.watch.watch_release(self._caller, model, stream.put))
        await self.check()
        await asyncio.shield(self._stored)
        if self.call.reserved:
            await to_thread.run_sync(self._serving.shrink_reservation, self.call, tokens, ask["n"])
        if proof is not None:
            await to_thread.run_sync(self._serving.note_load, self._caller, self.call, proof)

    async def pieces(self) -> AsyncIterator[Said]:
        """Yield the pieces; raise the error that ends them early. Behind a guard they come when all have ended."""
        self.outcome.texts = [""] * (self._ask["n"] if self._ask else 1)
        async for said in self._guard_events():
            if self.call.store_days is not None:
                self.outcome.texts[said["index"]] += said["text"]
            self._shown[said["index"]] = said["reply_tokens"]
            yield said

    async def _guard_events(self) -> AsyncIterator[Said]:
        if self._guard is None or not self._guard.rule.output:
            async for said in self._as_written():
                yield said
            return
        written = [said async for said in self._as_written()]
        for index in sorted({said["index"] for said in written}):
            own = [said for said in written if said["index"] == index]
            if await self._guard.flags(["".join(said["text"] for said in own)]):
                self.outcome.status = FILTERED
                own = [{**own[-1], "text": "", "tokens": [], "finish": FILTERED}]
            for said in own:
                yield said

    async def _as_written(self) -> AsyncIterator[Said]:
        stream = cast(Stream, self._stream)
        while True:
            said = await stream.next(self._serving.settings.serving_stall_s)
            if self.outcome.first_token_s is None:
                self.outcome.first_token_s = time.monotonic() - self._began
            if said["kind"] == "done":
                self.outcome.reply_tokens, self.outcome.status = said["reply_tokens"], "done"
                self.outcome.prompt_tokens = said.get("prompt_tokens", self.outcome.prompt_tokens)
                return
            if said["kind"] != "piece":
                raise engine_lost()
            self._written[said["index"]] = said["reply_tokens"]
            self.outcome.reply_tokens = sum(self._written.values())
            yield said

    async def check(self) -> None:
        """Raise unless the model is released to the caller at this moment."""
        await to_thread.run_sync(self._serving.check, self._caller, self.call)

    @property
    def shown_tokens(self) -> int:
        """The tokens of all pieces that were yielded so far."""
        return sum(self._shown.values())

    def note_sent(self, tokens: int) -> None:
        """Note how many tokens of the replies have left this process."""
        self._entry.note_sent(tokens)

    def note_end(self) -> None:
        """Note that the client has the answer, or never gets it: from now on the row alone says what is billed."""
        self._entry.close()

    def fail(self, error: AppError) -> None:
        """Record the error that the client gets."""
        self.outcome.status = error.code or error.type

    async def close(self) -> None:
        """Stop the engine's work on it and store what it came to, if it has a row; once is enough.

        Call `note_end` once nothing more is sent.
        """
        if self._is_closed:
            return
        self._is_closed = True
        with CancelScope(shield=True):
            self._stack.close()
            if self._stream is not None:
                self._stream.cancel()
            self.outcome.seconds = time.monotonic() - self._began
            await asyncio.wait([self._stored])
            if self._stored.exception() is None:
                await self._store_end()

    async def _store_end(self) -> None:
        try:
            await to_thread.run_sync(self._serving.finish, self._caller, self.call, self._ask, self.outcome)
        except SQLAlchemyError:
            self._entry.ended_as = self.outcome.status  # the next heartbeat that gets through completes the row
            raise


class Serving:
    """The models that this process answers with."""

    def __init__(self, settings: Settings, engine: Engine, storage: Storage, limits: RateLimits) -> None:
        self.settings, self._engine, self._limits = settings, engine, limits
        self.clients = Clients()
        self.engines = open_engines(settings, storage, self.clients, partial(db.transaction, engine))
        self._unattested: Engines | None = None
        self.watch, self.leases = Watch(engine, settings), CallLeases(engine, settings)

    @property
    def unattested_engines(self) -> Engines:
        """What speaks to servers that prove nothing; made when a policy names the first one."""
        if self._unattested is None:
            from app.inference.unattested import Unattested  # imports the client of OpenAI, which others do not need

            self._unattested = Unattested(self.settings, self.clients)
        return self._unattested

    async def open(self, caller: Principal, name: str, ask: Ask, endpoint: str) -> Reply:
        """Return the replies to a request, whose prompt was read; raise what keeps it from being answered."""
        with CancelScope(shield=True):  # a row that was made is completed
            call, stored = await self._admit(caller, name, ask, endpoint)
        reply = Reply(self, caller, call, stored)
        try:
            asked = cast(Ask, {**ask, "adapter": call.model.adapter, "max_tokens": call.max_tokens})
            await reply.begin(asked)
        except BaseException as error:
            if isinstance(error, AppError):
                name_field(error, endpoint)
                reply.fail(error)
            await reply.close()
            reply.note_end()
            raise
        return reply

    def shrink_reservation(self, call: Admitted, prompt_tokens: int, n: int) -> None:
        """Reserve no more than the positions that the prompt has left."""
        with db.transaction(self._engine) as session:
            calls.shrink_reservation(session, call, prompt_tokens, n)

    def note_load(self, caller: Principal, call: Admitted, proof: Proof) -> None:
        """Store that an adapter was loaded and proved."""
        with db.transaction(self._engine, _caller_scope(caller)) as session:
            calls.note_load(session, call.model, proof)

    def check(self, caller: Principal, call: Admitted) -> None:
        """Raise unless the model is released to the caller at this moment."""
        with db.read(self._engine) as session:
            check_again(session, caller, call.model, self.settings)

    def finish(self, caller: Principal, call: Admitted, ask: Ask | None, outcome: Outcome) -> None:
        """Store how a request ended, and count its tokens."""
        with db.transaction(self._engine) as session:
            calls.finish(session, call, ask, outcome)
            tokens = outcome.prompt_tokens + outcome.reply_tokens
            calls.spend(session, caller.project_id, self._limits, tokens)

    async def close(self) -> None:
        """End the engines, and the connections to servers."""
        self.watch.close()
        self.leases.close()
        self.engines.close()
        await self.clients.close()

    async def _admit(
        self, caller: Principal, name: str, ask: Ask, endpoint: str
    ) -> tuple[Admitted, asyncio.Task[None]]:
        """Return what may be answered, and a task that commits its row while the engine reads the prompt."""
        loop = asyncio.get_running_loop()
        decided: asyncio.Future[Admitted] = loop.create_future()

        def admit() -> None:
            with db.transaction(self._engine, _caller_scope(caller)) as session:
                owner = Owner(self.leases.owner, self.leases.lease_s)
                call = calls.admit(session, caller, name, ask, endpoint, self.settings, self._limits, owner)
                loop.call_soon_threadsafe(decided.set_result, call)

        stored = loop.create_task(to_thread.run_sync(admit))
        either: list[asyncio.Future[Any]] = [decided, stored]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not decided.done():
            stored.result()  # raises what keeps it from being answered
        return decided.result(), stored


def _caller_scope(caller: Principal) -> dict[str, object]:
    return {CALLER: Caller(caller)}
