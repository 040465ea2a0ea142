"""Whether a worker can do jobs at the moment: what it needs beside the job itself, each with a probe.

What failed once keeps the worker from taking jobs until its probe passes. A base model that it does not have keeps it
from the jobs on that model alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from pathlib import Path
from threading import Event

import structlog

from app.db.tables import Job
from app.errors import Unfit
from app.ops import preflight
from app.settings import Settings
from spard.config import JudgeSpec
from spard.config.patience import Patience
from worker import gpu, judge_probe
from worker.failures import Failure
from worker.metrics import WorkerMetrics
from worker.workdir import lock_work_dir

_LACKS_S = 3600.0  # after which a base model that could not be loaded is tried again though nothing about it changed
_THINGS = {  # what a failure says about
    "disk_error": "disk",
    "disk_full": "disk",
    "gpu_error": "gpu",
    "judge_unavailable": "judge",
    "model_missing": "models",
    "model_not_found": "models",
    "storage_full": "storage",
    "storage_unavailable": "storage",
}
Look = tuple[tuple[str, int, int], ...]  # a folder's files: name, size, time of the last change

log = structlog.get_logger(__name__)


class Fitness:
    """Of one worker. `environment` is that of its children."""

    def __init__(
        self,
        settings: Settings,
        metrics: WorkerMetrics,
        environment: Mapping[str, str],
        gpu_probe: Sequence[str] = gpu.PROBE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._metrics, self._environment, self._clock = settings, metrics, environment, clock
        self._gpu_probe = gpu_probe
        self._broken: set[str] = set()
        self._judge: JudgeSpec | None = None
        self._lacks: dict[str, tuple[Look, float]] = {}  # the source of a base model -> how it looked, and until when
        self._probes = {"disk": self._disk, "gpu": self._gpu, "judge": self._asked_judge, "storage": self._storage}

    def is_at_fault(self, what: Failure) -> bool:
        """Whether this worker, and not the job, explains a failure that is called a worker's."""
        match _THINGS.get(what.code):
            case "models":
                return what.code == "model_missing"
            case str(thing):
                return not self._probes[thing]()
            case None:
                return False

    def note(self, what: Failure, job: Job, seen: Look) -> None:
        """Remember what failed around a job; `seen` is how its base model's folder looked before the attempt.

        A folder that was changed since then, and before this call, is one to be tried again.
        """
        match _THINGS.get(what.code):
            case "models":
                source = job.spec.model.source
                self._lacks[source] = (seen, self._clock() + _LACKS_S)
                log.error("a base model cannot be loaded here; jobs on it are left to other workers", source=source)
                self._metrics.note_trouble("models", is_there=True)
            case str(thing):
                self._judge = job.spec.judge_spec or self._settings.judge
                self._broken.add(thing)

    def lacks(self) -> Collection[str]:
        """Return the sources of the base models that it does not have; one that looks another way is tried again."""
        now = self._clock()
        self._lacks = {
            source: (seen, until)
            for source, (seen, until) in self._lacks.items()
            if now < until and look(source) == seen
        }
        if not self._lacks:
            self._metrics.note_trouble("models", is_there=False)
        return self._lacks.keys()

    def await_fit(self, stop: Event) -> None:
        """Return when everything that failed works again, or `stop` is set."""
        for thing in sorted(self._broken):
            self._await(thing, stop)
        self._broken = set()
        self._metrics.is_fit = True

    def _await(self, thing: str, stop: Event) -> None:
        longest_s = self._settings.gpu_probe_s
        for wait_s in Patience(inf, min(self._settings.poll_s, longest_s), longest_s).waits():
            if stop.is_set() or self._probes[thing]():
                break
            self._metrics.is_fit = False
            self._metrics.note_trouble(thing, is_there=True)
            log.error("no job is taken until this works again", what=thing, next_look_s=wait_s)
            stop.wait(wait_s)
        self._metrics.note_trouble(thing, is_there=False)

    def _gpu(self) -> bool:
        return gpu.gpu_probe_succeeds(self._gpu_probe, self._environment, self._settings.gpus_per_job)

    def _disk(self) -> bool:
        return _passes(check_disk, self._settings)

    def _storage(self) -> bool:
        return _passes(preflight.check_storage, self._settings)

    def _asked_judge(self) -> bool:
        spec = self._judge or self._settings.judge
        asked = [each for each in spec.with_members() if each.name == "llm"]
        return all(judge_probe.answers(each, self._settings.judge_key(each)) for each in asked)


def check_disk(settings: Settings) -> None:
    """Raise `Unfit` if no attempt could make its folder: the disk is full, or the folders belong to another user."""
    preflight.check_folder(settings)
    work_dir = settings.work_dir()
    preflight.check_takes_files(work_dir)
    try:
        with lock_work_dir(work_dir):
            pass
    except OSError as error:
        raise Unfit(f"{error.filename} cannot be opened: {error.strerror}. Delete it, or set SPARD_DATA_DIR.") from None


def _passes(check: Callable[[Settings], None], settings: Settings) -> bool:
    try:
        check(settings)
    except Unfit as error:
        log.warning("a probe failed", why=error.message)
        return False
    return True


def look(source: str) -> Look:
    """Return what can be seen of a folder without reading it; nothing where there is none."""
    try:
        found = [(path.name, path.stat()) for path in sorted(Path(source).iterdir())]
    except OSError:
        return ()
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)
