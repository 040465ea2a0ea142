"""Listens to a child until it ends: news into the rows, what it keeps into storage, and an end to it when need be."""

from __future__ import annotations

import time
from threading import Event

import structlog

from app.checkpoints.records import EpochResult
from app.db import why
from app.db.tables.checkpoints import EPOCH
from app.settings import Settings
from worker.checkpoint_archives import CheckpointArchives
from worker.embedding_shards import EmbeddingShards
from worker.heartbeat import Heart
from worker.interrupts import DATABASE_AWAY, Cancelled, Lost, Overdue, Stalled
from worker.metrics import StageClock
from worker.process import Child
from worker.progress import Journal
from worker.protocol import Message
from worker.resume_state import Keeper
from worker.sinks.feed import Sinks
from worker.workdir import Folder

_WRITE_EVERY_S = 1.0
_LISTEN_S = 0.1
_GRACE = 0.8  # of the time that the worker has to stop in; the rest is for its last writes


class Listener:
    """For one child. It ends when the child has, or raises what ends it."""

    def __init__(
        self,
        child: Child,
        folder: Folder,
        journal: Journal,
        keeper: Keeper,
        checkpoints: CheckpointArchives,
        heart: Heart,
        stages: StageClock,
        sinks: Sinks,
        shards: EmbeddingShards,
        settings: Settings,
    ) -> None:
        self._child, self._folder, self._journal, self._keeper = child, folder, journal, keeper
        self._checkpoints, self._heart, self._stages, self._settings = checkpoints, heart, stages, settings
        self._sinks, self._shards = sinks, shards
        self._last_word: Message | None = None
        self._log = structlog.get_logger(__name__).bind(child=child.pid)

    def listen(self, stop: Event) -> Message | None:
        """Return the child's last message, `done` or `failed`; None if it ended without one."""
        heard = written = time.monotonic()
        give_up_at: float | None = None
        while not self._child.is_over:
            self._check()
            if give_up_at is None and (stop.is_set() or self._heart.pause_requested.is_set()):
                self._child.terminate()
                give_up_at = time.monotonic() + _GRACE * self._settings.stop_grace_s
            message = self._child.receive(_LISTEN_S)
            now = time.monotonic()
            if message:
                heard = now
                self._hear(message)
            if give_up_at is not None and now > give_up_at:
                break
            if now - heard > self._settings.stall_s:
                raise Stalled
            if now - written > _WRITE_EVERY_S and self._journal.has_news:
                self._write()
                written = now
        return self._last_word

    def _check(self) -> None:
        if self._heart.lost.is_set():
            raise Lost
        if self._heart.cancel_requested.is_set():
            raise Cancelled
        if self._heart.is_overdue.is_set():
            raise Overdue

    def _hear(self, message: Message) -> None:
        match message:
            case {"kind": "done"}:
                self._last_word = message
            case {"kind": "failed"}:
                self._last_word = message
                self._keep_stages()
            case {"kind": "resume_state", "step": int(step), "path": str(path)}:
                if self._keeper.keep_state(step, self._folder.root / path):
                    self._journal.keep(self._keeper.record)
            case {"kind": "checkpoint", "step": int(step), "metrics": dict(metrics), "safety": safety}:
                archive = self._checkpoints.upload(step) if message["has_adapter"] else None
                self._keep_stages()
                self._journal.note_checkpoint(step, EpochResult(EPOCH, metrics, safety, archive))
            case {"kind": "cached", "entry": str(entry), "made": bool(made)}:
                self._shards.hear(entry, made=made)
            case {"kind": "waiting", "thing": "judge"}:
                self._stages.note_judge_failure()
                self._journal.hear(message)
            case {"kind": "phase", "phase": str(phase)}:
                self._stages.begin(phase)
                self._journal.hear(message)
                self._keep_stages()
            case {"kind": "metrics", "step": int(step), "data": dict(data)}:
                self._sinks.step(step, data)
                self._journal.hear(message)
            case _:
                self._journal.hear(message)

    def _keep_stages(self) -> None:
        missed = self._keeper.keep_missed()
        if self._keeper.keep_stages() or missed is not None:
            self._journal.keep(self._keeper.record)

    def _write(self) -> None:
        """Write the news with a heartbeat; while the database is away they are kept for the next time."""
        try:
            self._heart.beat(self._journal.write)
        except DATABASE_AWAY as error:
            self._log.warning("the news wait for the database", error=why(error))
        else:
            self._journal.clear()
            self._keeper.delete_surplus()
