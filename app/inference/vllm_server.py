"""Ask a vLLM server for its version, models and limits, decide what it can serve, and share it between requests.

The limits are read when the service starts, instead of found out by the first refused request.

The gate is a readers-writer lock: requests share the server, and loading an adapter is exclusive. vLLM servers that
loaded an adapter while decoding have answered with another customer's adapter. The locks are files beside the adapters,
so they work between all API processes that use one server, and are released when a process ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from anyio import to_thread
from openai import APIConnectionError, APIStatusError, AsyncOpenAI
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from app import db
from app.catalog import service as catalog
from app.catalog.model_files import read_positions
from app.errors import AppError, InvalidRequest, TooManyRequests, Unavailable
from app.inference.clients import NO_KEY, Clients
from app.inference.protocol import busy, engine_lost
from app.inference.released import ReleasedModel
from app.settings import Settings
from spard.config import Lora

OLDEST = (0, 25)  # vllm#47724: 0.22.1 and 0.24.0 answered with another adapter after a load under traffic
_RANK_LIMIT = re.compile(r"max_lora_rank (\d+)")
_PROBE_NAME, _PROBE_RANK = "spard-rank-probe", 1_000_000
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")  # initializations that leave the base model alone
log = logging.getLogger(__name__)
LOOK_S = 30.0  # between two checks of the server
_ANSWER_S = 20.0  # without an answer for so long, a server counts as away
_PATIENCE_S = 1.0  # how long to wait for a moment without replies to ask for the largest rank
_PLACES = re.compile(r'vllm:lora_requests_info\{[^}]*max_lora="(\d+)"')
_ALWAYS = "models of which all weights were trained, and those on a quantized base model, are refused"
Positions = Mapping[str, int | None]  # alias -> context length of each offered base model; None: not known here


class NotServable(InvalidRequest):
    """The vLLM server cannot answer with this model, or not as its audit measured it."""

    code = "model_not_servable"

    def __init__(self, why: str) -> None:
        super().__init__(f"This model cannot be served here: {why}", param="model")


@dataclass(frozen=True, slots=True)
class Server:
    """A server's version, and the context length (prompt and reply, in tokens) of each model that it serves."""

    version: str
    contexts: Mapping[str, int]

    def context(self, base: str) -> int:
        """Return a base model's context length; raise `Unavailable` if the server does not serve it."""
        if base not in self.contexts:
            message = f"The server of SPARD_SERVING_URL serves no model '{base}': start it with --served-model-name."
            raise Unavailable(message, code="no_engine")
        return self.contexts[base]

    def refuse_adapters(self) -> str | None:
        """Return why this server must not load adapters (its version is too old), or None."""
        found = re.match(r"v?(\d+)\.(\d+)", self.version)
        if found and (int(found[1]), int(found[2])) >= OLDEST:
            return None
        floor = ".".join(map(str, OLDEST))
        return f"vLLM {self.version or 'of unknown version'} may swap adapters when it loads one: use {floor} or newer."


def require_whole(model: ReleasedModel) -> None:
    """Raise `NotServable` for a fully fine-tuned model, or one on a quantized base model."""
    if model.archive is not None and not model.archive.is_lora:
        raise NotServable("all of its weights were trained, and the server holds the base model's.")
    if model.quantization != "none":
        raise NotServable(f"it was measured on a base model in {model.quantization}, which the server does not hold.")


def server_root(url: str) -> str:
    """Return a server's URL without its OpenAI path `/v1`."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/").removesuffix("/v1"), "", ""))


def read_server(models: Any, version: Any) -> Server:
    """Parse the answers of `/v1/models` and `/version`."""
    cards = models.get("data", ()) if isinstance(models, dict) else ()
    contexts = {str(each["id"]): int(each["max_model_len"]) for each in cards if each.get("max_model_len")}
    return Server(str(version.get("version", "")) if isinstance(version, dict) else "", contexts)


async def ask_server(client: AsyncOpenAI) -> Server:
    """Ask a server for its version and models; raise `Unavailable` if it does not answer."""
    try:
        models = await client.get("/models", cast_to=object)
        try:
            version = await client.get(f"{server_root(str(client.base_url))}/version", cast_to=object)
        except APIStatusError:
            version = None
    except (APIConnectionError, APIStatusError):
        raise engine_lost() from None
    return read_server(models, version)


async def ask_rank(client: AsyncOpenAI, folder: Path) -> int | None:
    """Return the largest rank that a server loads; None if it does not say.

    The server names its limit when it refuses an adapter of a huge rank, which is written to `folder` without weights.
    Raises `Unavailable` if the server does not answer, or loads no adapters at run time.
    """
    probe = folder / _PROBE_NAME
    probe.mkdir(parents=True, exist_ok=True)
    facts = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "lora_alpha": 1}
    config = json.dumps(facts | {"r": _PROBE_RANK, "target_modules": ["q_proj"]})
    (probe / "adapter_config.json").write_text(config, encoding="utf-8")
    try:
        body = {"lora_name": _PROBE_NAME, "lora_path": str(probe)}
        await client.post("/load_lora_adapter", cast_to=str, body=body)
    except APIStatusError as error:
        # This refusal is the expected answer.
        if found := _RANK_LIMIT.search(error.message):
            return int(found[1])
        is_off = "not enabled" in error.message  # without --enable-lora
        if is_off or (error.status_code in (404, 405) and "adapter" not in error.message.lower()):
            raise no_loading() from None
        return None
    except APIConnectionError:
        raise engine_lost() from None
    with suppress(APIStatusError):
        await client.post("/unload_lora_adapter", cast_to=str, body={"lora_name": _PROBE_NAME})
    return None


def no_loading() -> Unavailable:
    """Return the error for a server that cannot load adapters at run time."""
    message = "The server of SPARD_SERVING_URL loads no adapters: start it with --enable-lora and "
    return Unavailable(f"{message}VLLM_ALLOW_RUNTIME_LORA_UPDATING=True.", code="no_engine")


def require_loadable(config: Mapping[str, Any], max_rank: int | None) -> None:
    """Raise `NotServable` if vLLM cannot load an adapter, or loads it differently from PEFT.

    `config` is its `adapter_config.json`, and `max_rank` the server's limit, if it is known.
    """
    if config.get("use_dora"):
        raise NotServable("vLLM loads no DoRA adapters.")
    if config.get("modules_to_save"):
        raise NotServable(f"vLLM loads no adapter with whole modules ({', '.join(config['modules_to_save'])}).")
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        raise NotServable("vLLM loads no adapter with biases.")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        raise NotServable(f"its first values ({init}) change the base model's weights, which vLLM does not do.")
    for name in ("alora_invocation_tokens", "layer_replication", "use_bdlora", "use_qalora"):
        if config.get(name):
            raise NotServable(f"vLLM does not know {name}.")
    rank = max([int(config["r"]), *_ranks(config.get("rank_pattern"))])
    if max_rank is not None and rank > max_rank:
        raise NotServable(f"its rank is {rank}, and the server was started with --max-lora-rank {max_rank}.")


def _ranks(pattern: object) -> Sequence[int]:
    return [int(each) for each in pattern.values()] if isinstance(pattern, dict) else ()


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that a server reported; None for a limit that it did not report.

    no_loading  why it cannot load adapters
    max_rank    the largest rank of an adapter
    places      how many adapters one batch can use (`--max-loras`)
    is_asked    True if the server could be asked for `max_rank`
    """

    server: Server
    no_loading: str | None = None
    max_rank: int | None = None
    places: int | None = None
    is_asked: bool = True

    def describe(self) -> str:
        """Return all limits as one line for the log."""
        contexts = [f"{name} {tokens}" for name, tokens in sorted(self.server.contexts.items())]
        facts = [f"vLLM {self.server.version or 'of unknown version'}"]
        facts.append(f"tokens of context: {', '.join(contexts)}" if contexts else "no model")
        facts.append("loads no adapters" if self.no_loading else f"adapters up to rank {self.max_rank or 'unknown'}")
        if self.places is not None:
            facts.append(f"{self.places} adapters at once")
        return "; ".join([*facts, _ALWAYS])

    def refusals(self, positions: Positions) -> list[str]:
        """Return a sentence for each kind of request that this server's settings make impossible, with the cure.

        `positions` are the context lengths of the offered base models.
        """
        found = []
        for alias, most in sorted(positions.items()):
            context = self.server.contexts.get(alias)
            if context is None:
                found.append(f"The vLLM server serves no model '{alias}': start it with --served-model-name {alias}.")
            elif most is not None and context < most:
                found.append(
                    f"The vLLM server gives '{alias}' {context} tokens of context of the model's {most}: longer "
                    f"requests are refused; start it with --max-model-len {most}."
                )
        if why := self.server.refuse_adapters() or self.no_loading:
            found.append(f"Models that were trained are refused: {why}")
        elif self.max_rank is not None and self.max_rank < Lora().rank:
            found.append(
                f"The vLLM server loads adapters up to rank {self.max_rank}, and jobs train rank {Lora().rank} by "
                "default: those are refused; start it with a larger --max-lora-rank."
            )
        return found


@dataclass(frozen=True, slots=True)
class ServerReport:
    """What the last check of a server found; `facts` is None if it did not answer."""

    facts: str | None
    refusals: tuple[str, ...]


async def ask_limits(client: AsyncOpenAI, settings: Settings, server: Server) -> Limits:
    """Ask a server for its limits; `is_asked` is False if running replies prevented the question for the largest rank.

    Raises `Unavailable` if the server does not answer.
    """
    places = await _ask_places(client)
    folder = settings.serving_adapters_dir
    if folder is None:
        return Limits(server, "SPARD_SERVING_ADAPTERS_DIR names no folder that the server reads.", None, places)
    if server.refuse_adapters():
        return Limits(server, places=places)
    try:
        async with Gate(folder).exclusive(_PATIENCE_S):  # the rank probe is a load, so it needs the server exclusively
            return Limits(server, None, await ask_rank(client, Path(folder).resolve()), places)
    except OSError as error:
        return Limits(
            server, f"SPARD_SERVING_ADAPTERS_DIR: {folder} cannot be written ({error.strerror}).", None, places
        )
    except TooManyRequests:  # replies are being written
        return Limits(server, places=places, is_asked=False)
    except Unavailable as error:
        if error.code != "no_engine":
            raise
        return Limits(server, error.message, None, places)


def away() -> ServerReport:
    """Return the report for a server that does not answer."""
    return ServerReport(None, ("The vLLM server of SPARD_SERVING_URL does not answer; nothing is until it does.",))


def offered_positions(engine: Engine) -> dict[str, int | None]:
    """Return the context length of each offered base model, by alias; None if it is not known here."""
    with db.read(engine) as session:
        offered = [(each.alias, each.source, each.revision) for each in catalog.base_models(session)]
    return {alias: read_positions(source, revision) for alias, source, revision in offered}


class ServerWatch:
    """Checks the vLLM server of the settings while the service runs, and logs what has changed."""

    def __init__(self, settings: Settings, engine: Engine, clients: Clients) -> None:
        self._settings, self._engine, self._clients = settings, engine, clients
        self._limits: Limits | None = None
        self.report: ServerReport | None = None

    async def run(self) -> None:
        """Check the server every 30 s until cancelled; a server that is away only gives a warning."""
        while True:
            try:
                self._note(await self.look())
            except SQLAlchemyError as error:
                log.warning("what the vLLM server refuses is not known: %s", db.why(error))
            except Exception:  # this task is the only one that checks, so it must go on
                log.exception("the vLLM server cannot be looked at")
            await asyncio.sleep(LOOK_S)

    async def look(self) -> ServerReport:
        """Ask the server for its version and models, and again for its limits if it was away or has changed."""
        positions = await to_thread.run_sync(offered_positions, self._engine)
        key = self._settings.serving_api_key
        url = str(self._settings.serving_url)
        async with self._clients.open_client(url, key.get_secret_value() if key else NO_KEY) as client:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    server = await ask_server(client)
                    if self._limits is None or self._limits.server != server or not self._limits.is_asked:
                        self._limits = await ask_limits(client, self._settings, server)
            except (AppError, TimeoutError):
                self._limits = None
                return away()
        return ServerReport(self._limits.describe(), tuple(self._limits.refusals(positions)))

    def _note(self, found: ServerReport) -> None:
        if found == self.report:
            return
        if found.facts:
            log.info("the vLLM server: %s", found.facts)
        for refusal in found.refusals:
            log.warning("%s", refusal)
        self.report = found


async def _ask_places(client: AsyncOpenAI) -> int | None:
    with suppress(APIStatusError, APIConnectionError):
        metrics = await client.get(f"{server_root(str(client.base_url))}/metrics", cast_to=str)
        if found := _PLACES.search(metrics):
            return int(found[1])
    return None


# Let requests share the server, and give a load of an adapter the server for itself.

_RETRY_S = 0.01  # between two attempts to take a lock
_LONGEST_LOAD_S = 300.0  # a load that takes longer belongs to a process that was stopped, which keeps its locks
PAUSE_S = 5 * _RETRY_S  # between two loads, so that waiting requests get in
_LOCK_MODE = 0o600


class Gate:
    """The gate of one server, with lock files in `folder`; without a folder no adapter can be loaded and nobody waits.

    A load takes `turn` and then `traffic` exclusively; a request needs `turn` free and shares `traffic`. So a load that
    waits for running requests already keeps new ones out.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._users, self._traffic = folder, 0, -1
        self._rests_until = 0.0

    async def enter(self) -> None:
        """Share the server until `leave`; wait while a load has it or waits for it.

        Raises 429 `engine_busy` if loads keep it for 5 minutes.
        """
        end = time.monotonic() + _LONGEST_LOAD_S
        while self._folder is not None and not self._enter():
            if time.monotonic() > end:
                raise busy("Another process of the service has been loading an adapter for too long.")
            await asyncio.sleep(_RETRY_S)

    def leave(self) -> None:
        """End one `enter`."""
        if self._folder is not None:
            self._users -= 1
            if not self._users:
                os.close(self._traffic)

    @asynccontextmanager
    async def share(self) -> AsyncIterator[None]:
        """Share the server with other requests inside the block."""
        await self.enter()
        try:
            yield
        finally:
            self.leave()

    @asynccontextmanager
    async def exclusive(self, patience_s: float) -> AsyncIterator[None]:
        """Use the server exclusively inside the block, while new requests wait.

        Raises 429 `engine_busy` if running replies do not end within `patience_s`. After that, no load tries again for
        as long, so that loads delay requests for at most half of the time.
        """
        if self._folder is None or time.monotonic() < self._rests_until:
            raise _no_turn()
        end, locks = time.monotonic() + patience_s, list[int]()
        try:
            for name in ("turn", "traffic"):
                locks.append(self._open(name))
                while not _lock(locks[-1], fcntl.LOCK_EX):
                    if time.monotonic() > end:
                        self._rests_until = time.monotonic() + patience_s
                        raise _no_turn()
                    await asyncio.sleep(_RETRY_S)
            yield
        finally:
            for lock in locks:
                os.close(lock)

    def _enter(self) -> bool:
        """Try to share the server; return False if a load has it or waits for it."""
        turn = self._open("turn")
        try:
            if not _lock(turn, fcntl.LOCK_SH):
                return False
            if not self._users:
                traffic = self._open("traffic")
                if not _lock(traffic, fcntl.LOCK_SH):
                    os.close(traffic)
                    return False
                self._traffic = traffic
            self._users += 1
            return True
        finally:
            os.close(turn)

    def _open(self, name: str) -> int:
        folder = self._folder or Path()
        path = folder / f".{name}.lock"
        with suppress(FileNotFoundError):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _LOCK_MODE)
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _LOCK_MODE)


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _no_turn() -> Exception:
    return busy("An adapter has to be loaded, and the server has no pause between replies at the moment.")
