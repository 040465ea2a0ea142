"""The engine processes of this API process: started on the first request, ended when idle or when memory is short."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from secrets import token_hex
from threading import Event, Lock, Thread
from typing import TypeVar

from huggingface_hub import snapshot_download

from app import locked_folders
from app.catalog import model_files
from app.errors import AppError, InvalidState, Unavailable
from app.inference import released
from app.inference.engine_process import EngineProcess, Stream
from app.inference.protocol import Ask, Proof, base_model_changed, busy, engine_lost, engine_stalled
from app.inference.released import ReleasedModel
from app.ops import processes
from app.settings import Settings
from app.storage import Storage
from spard.config.cpu import resolve_dtype
from spard.config.quantization import plain_digest

# Fetch the weights of fully fine-tuned models in threads of their own, one at a time for each project.
#
# The storage may be slow or away for minutes. That must not delay requests that need no weights from it, and a
# project that requests many of its models must not delay other projects.

_AT_ONCE = 8  # fetches at the same time, each for a different project


class WeightFetches:
    """The running fetches of one process, by the digest of the weights."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._running: dict[str, tuple[str, Future[EngineProcess]]] = {}

    def start(self, digest: str, project: str, work: Callable[[], EngineProcess]) -> Future[EngineProcess]:
        """Run `work`, which fetches weights and starts their engine, in a thread, and return a future of the engine.

        Calls for the same digest share one future. Raises 429 `engine_busy` if the project already fetches other
        weights, or if too many fetches run.
        """
        with self._lock:
            if digest in self._running:
                return self._running[digest][1]
            if any(each == project for each, _ in self._running.values()):
                raise busy("Another model of this project is being fetched from the storage; ask for this one later.")
            if len(self._running) >= _AT_ONCE:
                raise busy("Too many models are being fetched from the storage at the moment.")
            future: Future[EngineProcess] = Future()
            self._running[digest] = project, future
        Thread(target=self._run, args=(digest, work, future), name="weights", daemon=True).start()
        return future

    def _run(self, digest: str, work: Callable[[], EngineProcess], future: Future[EngineProcess]) -> None:
        try:
            found: EngineProcess | AppError = work()
        except AppError as error:
            found = error
        except BaseException:  # the service stops, or the disk is full; the client may try again
            log.exception("a model was not fetched")
            found = engine_lost()
        with self._lock:
            del self._running[digest]
        if isinstance(found, AppError):
            future.set_exception(found)
        else:
            future.set_result(found)


# The folders of one process's engines; folders of processes that have died are removed.


class EngineFolders:
    """This process's folder below `root`, locked while the process lives, with a subfolder for each engine."""

    def __init__(self, root: Path) -> None:
        self._root, self._lock = root, Lock()
        self._own: Path | None = None

    def new(self) -> Path:
        """Return a path for a new engine's folder, without creating it; safe from any thread."""
        return self.own_folder() / token_hex(6)

    def own_folder(self) -> Path:
        """Return this process's folder, created and locked by the first call."""
        with self._lock:
            if self._own is None:
                self._own = self._make()
            return self._own

    def remove(self) -> None:
        """Remove this process's folder with all engines' folders."""
        if self._own:
            shutil.rmtree(self._own, ignore_errors=True)

    def _make(self) -> Path:
        locked_folders.remove_abandoned(self._root)
        own = self._root / token_hex(8)
        locked_folders.create(own)
        return own


log = logging.getLogger(__name__)

Found = TypeVar("Found")

_LOOK_S = 1.0
_PAUSE_S = 10.0  # a longer gap between two looks means that this process was suspended, not just busy
_TRIES = 3  # to load an adapter that other requests evict at the same time
_OWN_MB = 400  # memory of an engine beside its model's weights
_BYTES_EACH = {"float32": 4, "bfloat16": 2}  # of a weight in main memory; for a GPU it is read as bfloat16, then moved


class EmbeddedEngines:
    """Implements `Engines` with at most `serving_models` engine processes, each for one base model and its adapters."""

    def __init__(self, settings: Settings, storage: Storage) -> None:
        self._settings, self._storage = settings, storage
        self._engines: dict[str, EngineProcess] = {}
        self._lock, self._closed = Lock(), Event()
        self._folders = EngineFolders(settings.data_dir.resolve() / "serve")
        # The kernel ends an engine with the thread that started it, so one thread that never ends starts them all.
        # It downloads nothing: a slow download would delay the engines of all other models.
        self._keeper = ThreadPoolExecutor(1, thread_name_prefix="engines")
        self._fetches = WeightFetches()
        self._watch: Thread | None = None

    async def start(self, model: ReleasedModel, project: str, ask: Ask) -> tuple[Stream, int, Proof | None]:
        """Return the replies' stream, the prompt's number of tokens, and a proof if this request loaded the adapter."""
        engine, proof = await self._ready(model, project), None
        for _ in range(_TRIES):
            stream = engine.generate(project, ask, 8 * self._settings.serving_rows)
            try:
                said = await stream.next(self._settings.serving_stall_s)
            except BaseException:
                stream.cancel()
                raise
            if said["kind"] == "started":
                return stream, said["prompt_tokens"], proof
            proof = await self._load_adapter(engine, model)
        raise busy("Too many adapters are asked for at the moment.")

    async def _ready(self, model: ReleasedModel, project: str) -> EngineProcess:
        """Return the model's engine once it is ready.

        An engine that has read other files than the catalog's digest names is restarted once; raises
        `base_model_changed` if that does not help.
        """
        for _ in range(2):
            warm = self._running_engine(_key(model))
            engine = warm if warm else await self._await_start(self._new_engine(model, project))
            said = await self._await_start(engine.ready)
            if _is_own(model) or model.digest in (None, plain_digest(said["digest"])):
                return engine
            await asyncio.wrap_future(self._keeper.submit(self._end_stale, _key(model), engine))
        log.error("the folder of %s has changed since it was added; put it back, or add it again", model.base)
        raise base_model_changed()

    async def _await_start(self, future: Future[Found]) -> Found:
        """Wait up to `serving_start_s` for a step of starting an engine; the step itself is never cancelled."""
        try:
            waited = asyncio.shield(asyncio.wrap_future(future))
            return await asyncio.wait_for(waited, self._settings.serving_start_s)
        except TimeoutError:
            raise Unavailable("The model is still being loaded; try again.", code="engine_timeout") from None

    async def unload_withdrawn(self) -> None:
        """Do nothing: replies of withdrawn models end by `Watch`, and every request checks the release."""

    def pids(self) -> list[int]:
        """Return the process ids of the running engines."""
        return [each.pid for each in self._engines.values() if each.is_alive]

    def close(self) -> None:
        """End all engines."""
        self._closed.set()
        with self._lock:
            for engine in self._engines.values():
                engine.end()
            self._engines.clear()
        self._keeper.shutdown(wait=False, cancel_futures=True)
        self._folders.remove()

    async def _load_adapter(self, engine: EngineProcess, model: ReleasedModel) -> Proof:
        archive = model.archive
        if archive is None:
            raise engine_lost()
        provide = partial(released.fetch_archive, self._storage, self._settings, archive)
        loading = engine.load(archive.sha256, provide)
        return await asyncio.shield(asyncio.wrap_future(loading))

    def _running_engine(self, key: str) -> EngineProcess | None:
        """Return the engine of this key if it is alive."""
        with self._lock:
            found = self._engines.get(key)
        return found if found and found.is_alive else None

    def _new_engine(self, model: ReleasedModel, project: str) -> Future[EngineProcess]:
        """Start the engine of a model in the background, after fetching its weights if they are in the storage."""
        if self._closed.is_set():
            raise Unavailable("The service stops.")
        if importlib.util.find_spec("torch") is None:
            message = "No engine serves models here: install 'spard-service[worker]', or set SPARD_SERVING_URL."
            raise Unavailable(message, code="no_engine")
        if model.archive and _is_own(model):
            return self._fetches.start(model.archive.sha256, project, partial(self._fetch_and_start, model))
        return self._keeper.submit(self._start_engine, model)

    def _fetch_and_start(self, model: ReleasedModel) -> EngineProcess:
        """Fetch a fully fine-tuned model's weights and return its engine; runs in a thread of `WeightFetches`."""
        folder = self._folders.new()
        if model.archive is None:
            raise engine_lost()
        try:
            released.fetch_archive(self._storage, self._settings, model.archive, folder / "model")
            engine = self._keeper.submit(self._start_engine, model, folder).result()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if engine.folder != folder:  # another request has started the engine meanwhile
            shutil.rmtree(folder, ignore_errors=True)
        return engine

    def _start_engine(self, model: ReleasedModel, folder: Path | None = None) -> EngineProcess:
        """Return the engine of a model, started if it does not run; runs in the keeper's thread.

        `folder` holds the model's own weights, if it has any.
        """
        key = _key(model)
        if found := self._running_engine(key):
            return found
        self._end(key)
        folder = folder or self._folders.new()
        try:
            engine = self._new(model, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        with self._lock:
            self._engines[key] = engine
        if self._watch is None:
            self._watch = Thread(target=self._supervise, name="engines watch", daemon=True)
            self._watch.start()
        return engine

    def _new(self, model: ReleasedModel, folder: Path) -> EngineProcess:
        source = self._source(model, folder)
        size = model_files.parameters(source)
        if size is None:
            raise InvalidState("The model's weights cannot be read where it is served.", code="engine_failed")
        self._make_room(size)
        return EngineProcess(self._settings, source, None, folder, model.quantization, model.template_arguments)

    def _source(self, model: ReleasedModel, folder: Path) -> str:
        if _is_own(model):
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
        """End idle engines, least recently used first, until there is room for one more.

        Raises 429 `engine_busy` if the remaining engines are all in use.
        """
        dtype = "bfloat16" if self._settings.serving_device == "cuda" else resolve_dtype(self._settings.cpu_dtype)
        needed = (parameters * _BYTES_EACH[dtype] >> 20) + _OWN_MB
        while len(self._engines) >= self._settings.serving_models or self._is_short(needed):
            idle = [key for key, each in self._engines.items() if each.is_idle or not each.is_alive]
            if not idle:
                raise busy("There is no memory for another model at the moment.")
            self._end(min(idle, key=lambda key: self._engines[key].used_at))

    def _is_short(self, needed_mb: int) -> bool:
        left = processes.available_mb()
        return left is not None and left - needed_mb < self._settings.serving_reserve_mb

    def _supervise(self) -> None:
        """End engines that are idle for too long or hang, and the least recently used one when memory is short."""
        looked_at = time.monotonic()
        while not self._closed.wait(_LOOK_S):
            now, last = time.monotonic(), looked_at
            looked_at = now
            for key, each in list(self._engines.items()):
                if now - last > _PAUSE_S:  # this process was suspended, so silence says nothing about the engine
                    each.heard_at = now
                elif each.is_alive and each.silent_s > self._settings.serving_step_s:
                    log.error(
                        "an engine has not stepped for %.0f s: it is ended, and started anew when asked", each.silent_s
                    )
                    self._end(key, engine_stalled())
                elif not each.is_alive or (each.is_idle and now - each.used_at > self._settings.serving_idle_s):
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
        """End an engine that has read changed files, unless another one has replaced it already."""
        if self._engines.get(key) is engine:
            self._end(key, base_model_changed())


def _is_own(model: ReleasedModel) -> bool:
    """Return True for a fully fine-tuned model: its archive holds all weights, not an adapter."""
    return model.archive is not None and not model.archive.is_lora


def _key(model: ReleasedModel) -> str:
    """Return the key of the engine that serves a model: all adapters of a base model share one.

    A folder that is offered with other arguments of its chat template is another base model.
    """
    if model.archive and _is_own(model):
        return model.archive.sha256
    return f"{model.source}@{model.revision}+{model.quantization}{model.template_arguments}"
