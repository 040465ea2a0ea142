"""Serve one inference request from admission to its end: check, row, engine, guard, token counts.

The replies are written by engines, which share a protocol; the settings say which engines are opened.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, Protocol, cast

from anyio import CancelScope, to_thread
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from app import db
from app.audit_log import CALLER, Caller
from app.db import Begin
from app.errors import AppError, Unavailable
from app.http.rate_limit import RateLimits
from app.inference import calls
from app.inference.call_leases import CallLeases
from app.inference.calls import AdmittedCall, Outcome, Owner
from app.inference.clients import Clients
from app.inference.embedded import EmbeddedEngines
from app.inference.engine_process import Stream
from app.inference.guard import FILTERED, open_guard
from app.inference.protocol import Ask, EngineMessage, Proof, engine_lost, name_field
from app.inference.released import ReleasedModel, check_again
from app.keys import Principal
from app.settings import Settings
from app.storage import Storage

if TYPE_CHECKING:
    from app.inference.vllm_server import ServerWatch


log = logging.getLogger(__name__)

# Check repeatedly that the models of running replies are still released, and end the replies of those that are not.

LOOK_S = 0.4  # between two checks, so that a withdrawal ends replies within a second


@dataclass(frozen=True, slots=True, eq=False)
class _Reply:
    caller: Principal
    model: ReleasedModel
    end: Callable[[AppError], None]


class Watch:
    """The running replies of this process; one thread checks them all."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine, self._settings = engine, settings
        self._replies: set[_Reply] = set()
        self._lock, self._begun, self._is_closed = Lock(), Event(), False
        self._thread: Thread | None = None

    @contextmanager
    def watch_release(self, caller: Principal, model: ReleasedModel, end: Callable[[AppError], None]) -> Iterator[None]:
        """While the block runs, call `end` with an error as soon as the model is not released to the caller.

        `end` is called from another thread.
        """
        reply = _Reply(caller, model, end)
        with self._lock:
            self._replies.add(reply)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="released", daemon=True)
                self._thread.start()
        self._begun.set()
        try:
            yield
        finally:
            with self._lock:
                self._replies.discard(reply)

    def close(self) -> None:
        """Stop checking."""
        self._is_closed = True
        self._begun.set()

    def _run(self) -> None:
        pause = Event()
        while not self._is_closed:
            with self._lock:
                replies = list(self._replies)
                if not replies:
                    self._begun.clear()
            if not replies:
                self._begun.wait()
                continue
            self._look(replies)
            pause.wait(LOOK_S)

    def _look(self, replies: list[_Reply]) -> None:
        """Check each pair of caller and model once, and end its replies if the check fails or the database is away."""
        by_what: dict[tuple[Principal, ReleasedModel], list[_Reply]] = {}
        for reply in replies:
            by_what.setdefault((reply.caller, reply.model), []).append(reply)
        for (caller, model), same in by_what.items():
            error = self._wrong(caller, model)
            if error is not None:
                log.warning("replies of a model are ended: %s", error.code)
                for reply in same:
                    reply.end(error)

    def _wrong(self, caller: Principal, model: ReleasedModel) -> AppError | None:
        try:
            with db.read(self._engine) as session:
                check_again(session, caller, model, self._settings)
        except AppError as error:
            return error
        except SQLAlchemyError:
            return Unavailable("The database does not answer, so the model's release cannot be checked; try again.")
        except Exception:  # such as a policy of a newer version; this thread is the only one, so it must go on
            log.exception("it cannot be told whether a model is released")
            return Unavailable("The model's release cannot be checked at the moment; try again.")
        return None


CANCELLED = "client_gone"


class Reply:
    """The replies to one request, piece by piece.

    Routes take it through `app.inference.answers`, which closes it, as that completes the request's row, and its entry
    in the ledger:

        reply = await replies.open(caller, "ft:...", ask, "completions")
        async for said in reply.pieces():
            ...
    """

    def __init__(
        self, serving: InferenceService, caller: Principal, call: AdmittedCall, stored: asyncio.Task[None]
    ) -> None:
        self._serving, self._caller, self.call, self._stored = serving, caller, call, stored
        self.created = int(time.time())
        self._began, self._stack = time.monotonic(), ExitStack()
        self.outcome = Outcome(CANCELLED)
        self._stream: Stream | None = None
        self._entry = serving.leases.open(call.id)
        self._shown: dict[int, int] = {}  # reply index -> tokens that `pieces` has yielded
        self._written: dict[int, int] = {}  # reply index -> tokens that the engine has written
        self._is_closed = False
        self._ask: Ask | None = None
        self._guard = open_guard(call.guard, serving.settings, serving.clients)

    @property
    def is_attested(self) -> bool:
        """Return True if the engine has proved which weights it answers with."""
        return self.call.model.server is None

    @property
    def fingerprint(self) -> str | None:
        """The digest of the model's archive; None for a base model."""
        archive = self.call.model.archive
        return f"sha256:{archive.sha256}" if archive else None

    async def begin(self, ask: Ask) -> None:
        """Check the request with the guard and start it on an engine.

        Returns only after the row is committed and the model is still released, so that nothing is shown before.
        """
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

    async def pieces(self) -> AsyncIterator[EngineMessage]:
        """Yield the pieces of the replies; raise the error that ends them early.

        If a guard checks output, pieces are held back until all replies have ended and were checked.
        """
        self.outcome.texts = [""] * (self._ask["n"] if self._ask else 1)
        async for said in self._guard_events():
            if self.call.store_days is not None:
                self.outcome.texts[said["index"]] += said["text"]
            self._shown[said["index"]] = said["reply_tokens"]
            yield said

    async def _guard_events(self) -> AsyncIterator[EngineMessage]:
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

    async def _as_written(self) -> AsyncIterator[EngineMessage]:
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
        """Raise an error if the model is no longer released to the caller."""
        await to_thread.run_sync(self._serving.check, self._caller, self.call)

    @property
    def shown_tokens(self) -> int:
        """The number of tokens in all pieces that were yielded so far."""
        return sum(self._shown.values())

    def note_sent(self, tokens: int) -> None:
        """Record how many tokens of the replies were sent to the client."""
        self._entry.note_sent(tokens)

    def note_end(self) -> None:
        """Close the ledger entry: nothing more is sent, so from now on only the row decides what is billed."""
        self._entry.close()

    def fail(self, error: AppError) -> None:
        """Record the error that the client gets as the request's status."""
        self.outcome.status = error.code or error.type

    async def close(self) -> None:
        """Stop the engine's work and complete the row, if there is one; further calls do nothing.

        Call `note_end` after it, once nothing more is sent.
        """
        if self._is_closed:
            return
        self._is_closed = True
        with CancelScope(shield=True):  # a client that disconnects must not keep the row from being completed
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
            self._entry.ended_as = self.outcome.status  # the next successful heartbeat completes the row
            raise


class InferenceService:
    """The inference service of one API process: engines, HTTP clients, leases and the release watch."""

    def __init__(self, settings: Settings, engine: Engine, storage: Storage, limits: RateLimits) -> None:
        self.settings, self._engine, self._limits = settings, engine, limits
        self.clients = Clients()
        self.engines = open_engines(settings, storage, self.clients, partial(db.transaction, engine))
        self._unattested: Engines | None = None
        self.watch, self.leases = Watch(engine, settings), CallLeases(engine, settings)

    @property
    def unattested_engines(self) -> Engines:
        """The client of unattested servers, created when a policy names the first one."""
        if self._unattested is None:
            from app.inference.unattested import UnattestedEngines  # imports openai, which embedded engines do not need

            self._unattested = UnattestedEngines(self.settings, self.clients)
        return self._unattested

    async def open(self, caller: Principal, name: str, ask: Ask, endpoint: str) -> Reply:
        """Admit a request, start it on an engine, and return its reply; raise an `AppError` if it cannot be answered.

        Only `app.inference.answers` may call it, which ends every reply that it has opened. `name` is the model's name,
        and `endpoint` the kind of request, as `completions`, for the row and for errors.
        """
        with CancelScope(shield=True):  # once a row is inserted, a `Reply` has to exist that completes it
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

    def shrink_reservation(self, call: AdmittedCall, prompt_tokens: int, n: int) -> None:
        """Lower the request's reservation to the tokens that fit after its prompt."""
        with db.transaction(self._engine) as session:
            calls.shrink_reservation(session, call, prompt_tokens, n)

    def note_load(self, caller: Principal, call: AdmittedCall, proof: Proof) -> None:
        """Record in the audit log that an adapter was loaded and proved."""
        with db.transaction(self._engine, _caller_scope(caller)) as session:
            calls.note_load(session, call.model, proof)

    def check(self, caller: Principal, call: AdmittedCall) -> None:
        """Raise an error if the model is no longer released to the caller."""
        with db.read(self._engine) as session:
            check_again(session, caller, call.model, self.settings)

    def finish(self, caller: Principal, call: AdmittedCall, ask: Ask | None, outcome: Outcome) -> None:
        """Store how a request ended, and count its tokens against the project's rate."""
        with db.transaction(self._engine) as session:
            calls.finish(session, call, ask, outcome)
            tokens = outcome.prompt_tokens + outcome.reply_tokens
            calls.spend(session, caller.project_id, self._limits, tokens)

    async def close(self) -> None:
        """End the engines and close the connections to servers."""
        self.watch.close()
        self.leases.close()
        self.engines.close()
        await self.clients.close()

    async def _admit(
        self, caller: Principal, name: str, ask: Ask, endpoint: str
    ) -> tuple[AdmittedCall, asyncio.Task[None]]:
        """Return the admitted request, and a task that commits its row while the engine already reads the prompt."""
        loop = asyncio.get_running_loop()
        decided: asyncio.Future[AdmittedCall] = loop.create_future()

        def admit() -> None:
            with db.transaction(self._engine, _caller_scope(caller)) as session:
                owner = Owner(self.leases.owner, self.leases.lease_s)
                call = calls.admit(session, caller, name, ask, endpoint, self.settings, self._limits, owner)
                loop.call_soon_threadsafe(decided.set_result, call)

        stored = loop.create_task(to_thread.run_sync(admit))
        either: list[asyncio.Future[Any]] = [decided, stored]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not decided.done():
            stored.result()  # raises the error that refused the request
        return decided.result(), stored


def _caller_scope(caller: Principal) -> dict[str, object]:
    return {CALLER: Caller(caller)}


# Open the engines that write replies.


class Engines(Protocol):
    """What writes the replies: embedded engines, a vLLM server, or servers that a policy names."""

    async def start(self, model: ReleasedModel, project: str, ask: Ask) -> tuple[Stream, int, Proof | None]:
        """Begin a request; return its stream, the prompt's number of tokens, and a proof if an adapter was loaded.

        The proof is None if the adapter was loaded earlier. Raises an `AppError` if the request cannot be answered.
        """

    async def unload_withdrawn(self) -> None:
        """Make external servers unload the adapters of withdrawn models."""

    def pids(self) -> list[int]:
        """Return the ids of local engine processes."""

    def close(self) -> None:
        """End local engine processes."""


def open_engines(settings: Settings, storage: Storage, clients: Clients, begin: Begin) -> Engines:
    """Return embedded engines, or the vLLM server of `SPARD_SERVING_URL` if that is set."""
    own = EmbeddedEngines(settings, storage)
    if settings.serving_url is None:
        return own
    from app.inference.vllm import Vllm  # imports openai, which embedded engines do not need

    return Vllm(settings, storage, own, clients, begin)


def server_watch(settings: Settings, engine: Engine, clients: Clients) -> ServerWatch | None:
    """Return the object that checks the vLLM server regularly; None with embedded engines."""
    if settings.serving_url is None:
        return None
    from app.inference.vllm_server import ServerWatch

    return ServerWatch(settings, engine, clients)
