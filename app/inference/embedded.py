"""The engines of this process: started when first asked, warm after, ended when idle or when memory is short."""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import logging
import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from secrets import token_hex
from threading import Event, Lock, Thread

from huggingface_hub import snapshot_download

from app.catalog import weights
from app.db import Begin
from app.errors import AppError, InvalidState, Unavailable
from app.inference import archives, memory
from app.inference.engine_errors import base_model_changed, busy, engine_lost
from app.inference.engine_process import EngineProcess, Stream
from app.inference.protocol import Ask, Proof
from app.inference.released import Released
from app.settings import Settings
from app.storage import Storage
from spard.config.quantization import plain_digest

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_TRIES = 3  # to have an adapter loaded that others push out at the same time
_OWN_MB = 400  # of an engine, beside its model's weights
_BYTES_EACH = {"cpu": 4, "cuda": 2}  # of a weight in main memory; for a GPU it is read in bfloat16 on its way there


class Embedded:
    """At most `serving_models` engines, each with one base model and any number of adapters."""

    def __init__(self, settings: Settings, storage: Storage) -> None:
        self._settings, self._storage = settings, storage
        self._engines: dict[str, EngineProcess] = {}
        self._lock, self._closed = Lock(), Event()
        self._root = settings.data_dir.resolve() / "serve"
        self._own: Path | None = None
        # The kernel ends an engine with the thread that started it, so one thread starts every one and waits.
        self._keeper = ThreadPoolExecutor(1, thread_name_prefix="engines")
        self._watch: Thread | None = None

    async def start(self, model: Released, project: str, ask: Ask) -> tuple[Stream, int, Proof | None]:
        """Return the replies' stream and the number of the prompt's tokens; with a proof if the adapter was loaded."""
        engine, proof = await self._ready(model), None
        for _ in range(_TRIES):
            stream = engine.generate(project, ask, 8 * self._settings.serving_rows)
            try:
                said = await stream.next(self._settings.serving_stall_s)
            except BaseException:
                stream.cancel()
                raise
            if said["kind"] == "started":
                return stream, said["prompt_tokens"], proof
            proof = await self._loaded(engine, model)
        raise busy("Too many adapters are asked for at the moment.")

    async def _ready(self, model: Released) -> EngineProcess:
        """Return the model's engine once it can answer; one that has read other files is started again, once."""
        for _ in range(2):
            engine = await asyncio.wrap_future(self._engine(model))
            ready = asyncio.shield(asyncio.wrap_future(engine.ready))
            try:
                said = await asyncio.wait_for(ready, self._settings.serving_start_s)
            except TimeoutError:
                raise Unavailable("The model is still being loaded; try again.", code="engine_timeout") from None
            if _is_own(model) or model.digest in (None, plain_digest(said["digest"])):
                return engine
            await asyncio.wrap_future(self._keeper.submit(self._end_stale, _key(model), engine))
        log.error("the folder of %s has changed since it was added; put it back, or add it again", model.base)
        raise base_model_changed()

    async def unload_withdrawn(self, begin: Begin) -> None:
        """Nothing outlives its release here."""

    def pids(self) -> list[int]:
        """Return the numbers of the engines that run."""
        return [each.pid for each in self._engines.values() if each.is_alive]

    def close(self) -> None:
        """End all engines."""
        self._closed.set()
        with self._lock:
            for engine in self._engines.values():
                engine.end()
            self._engines.clear()
        self._keeper.shutdown(wait=False, cancel_futures=True)
        if self._own:
            shutil.rmtree(self._own, ignore_errors=True)

    async def _loaded(self, engine: EngineProcess, model: Released) -> Proof:
        archive = model.archive
        if archive is None:
            raise engine_lost()
        provide = partial(archives.fetch, self._storage, self._settings, archive)
        loading = engine.load(archive.sha256, provide)
        return await asyncio.shield(asyncio.wrap_future(loading))

    def _engine(self, model: Released) -> Future[EngineProcess]:
        if self._closed.is_set():
            raise Unavailable("The service stops.")
        if importlib.util.find_spec("torch") is None:
            message = "No engine serves models here: install 'spard-service[worker]', or set SPARD_SERVING_URL."
            raise Unavailable(message, code="no_engine")
        return self._keeper.submit(self._started, model)

    def _started(self, model: Released) -> EngineProcess:
        """Return the engine of a model; runs in the keeper's thread, one start after the other."""
        key = _key(model)
        with self._lock:
            found = self._engines.get(key)
            if found and found.is_alive:
                return found
        self._end(key)
        folder = self._folder() / token_hex(6)
        try:
            engine = self._new(model, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        with self._lock:
            self._engines[key] = engine
        if self._watch is None:
            self._watch = Thread(target=self._look_after, name="engines watch", daemon=True)
            self._watch.start()
        return engine

    def _new(self, model: Released, folder: Path) -> EngineProcess:
        source = self._source(model, folder)
        size = weights.parameters(source)
        if size is None:
            raise InvalidState("The model's weights cannot be read where it is served.", code="engine_failed")
        self._make_room(size)
        return EngineProcess(self._settings, source, None, folder, model.quantization)

    def _source(self, model: Released, folder: Path) -> str:
        if model.archive and _is_own(model):
            archives.fetch(self._storage, self._settings, model.archive, folder / "model")
            return str(folder / "model")
        if Path(model.source).is_dir():
            return model.source
        try:
            return snapshot_download(model.source, revision=model.revision, local_files_only=True)
        except (OSError, ValueError):
            raise InvalidState(
                "The model's files are not on the machine that serves it.", code="engine_failed"
            ) from None

    def _make_room(self, parameters: int) -> None:
        """End engines that nobody waits for until there is room for one more; 429 where there is none."""
        needed = (parameters * _BYTES_EACH[self._settings.serving_device] >> 20) + _OWN_MB
        while len(self._engines) >= self._settings.serving_models or self._is_short(needed):
            idle = [key for key, each in self._engines.items() if each.is_idle or not each.is_alive]
            if not idle:
                raise busy("There is no memory for another model at the moment.")
            self._end(min(idle, key=lambda key: self._engines[key].used_at))

    def _is_short(self, needed_mb: int) -> bool:
        left = memory.available_mb()
        return left is not None and left - needed_mb < self._settings.serving_reserve_mb

    def _look_after(self) -> None:
        """End engines that were idle for long, and the ones used least when memory is short."""
        while not self._closed.wait(_LOOK_S):
            now = time.monotonic()
            for key, each in list(self._engines.items()):
                if not each.is_alive or (each.is_idle and now - each.used_at > self._settings.serving_idle_s):
                    self._end(key)
            left = list(self._engines.items())
            if left and self._is_short(0):
                key, _ = min(left, key=lambda each: (not each[1].is_idle, each[1].used_at))
                log.warning("memory is short: an engine gives way")
                self._end(key, busy("The memory is needed for training at the moment."))

    def _end(self, key: str, error: AppError | None = None) -> None:
        with self._lock:
            engine = self._engines.pop(key, None)
        if engine:
            engine.end(error)
            shutil.rmtree(engine.folder, ignore_errors=True)

    def _end_stale(self, key: str, engine: EngineProcess) -> None:
        """End an engine that has read other files than those that were offered, unless another has taken its place."""
        if self._engines.get(key) is engine:
            self._end(key, base_model_changed())

    def _folder(self) -> Path:
        """Return the folder of this process's engines, locked; those of processes that are gone are removed."""
        if self._own is None:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in self._root.iterdir():
                if _is_abandoned(left):
                    shutil.rmtree(left, ignore_errors=True)
            self._own = self._root / token_hex(8)
            self._own.mkdir(mode=0o700)
            lock = os.open(self._own / "lock", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
        return self._own


def _is_own(model: Released) -> bool:
    """Tell whether a model brings all of its weights, and needs no base model beside them."""
    return model.archive is not None and not model.archive.is_lora


def _key(model: Released) -> str:
    """Return the name of the engine that answers for a model."""
    if model.archive and _is_own(model):
        return model.archive.sha256
    return f"{model.source}@{model.revision}+{model.quantization}"


def _is_abandoned(folder: Path) -> bool:
    try:
        lock = os.open(folder / "lock", os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
