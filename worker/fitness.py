"""Track if a worker can do jobs now: disk, GPU, judge and storage each have a probe.

After a failure the worker takes no jobs until the probe of that resource passes. A missing base model keeps it only
from jobs on that model.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from http.client import HTTPException
from math import inf
from pathlib import Path
from threading import Event
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

import structlog

from app.db.tables import Job
from app.errors import Unfit
from app.ops import preflight
from app.settings import Settings
from spard.config import JudgeSpec
from spard.config.patience import Patience
from worker import gpu
from worker.failures import Failure
from worker.metrics import WorkerMetrics

_LACKS_S = 3600.0  # then a base model that could not be loaded is tried again, even if its files are the same
_THINGS = {  # failure code -> the resource that may be broken
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
    """The resources that one worker needs and which of them are broken.

    The GPU is probed by a process with `environment`, as the worker's children have it.
    """

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
        self._lacks: dict[str, tuple[Look, float]] = {}  # a base model's source -> its files then, and when it expires
        self._probes = {"disk": self._disk, "gpu": self._gpu, "judge": self._asked_judge, "storage": self._storage}

    def is_at_fault(self, what: Failure) -> bool:
        """Return True if a probe confirms that this worker, and not the job, causes the failure."""
        match _THINGS.get(what.code):
            case "models":
                return what.code == "model_missing"
            case str(thing):
                return not self._probes[thing]()
            case None:
                return False

    def note(self, what: Failure, job: Job, seen: Look) -> None:
        """Remember a failure that was not the job's; `seen` describes its base model's folder before the attempt.

        Comparing with the folder from before means that a folder changed during the attempt is tried again.
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
        """Return the sources of base models that failed to load here, except where their files have changed since."""
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
        """Block until the probes of all broken resources pass, or `stop` is set."""
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
        return all(judge_answers(each, self._settings.judge_key(each)) for each in asked)


def check_disk(settings: Settings) -> None:
    """Raise `Unfit` if an attempt cannot make its folder: the disk is full, or the folders belong to another user."""
    preflight.check_folder(settings)
    work_dir = settings.work_dir()
    preflight.check_takes_files(work_dir)


def _passes(check: Callable[[Settings], None], settings: Settings) -> bool:
    try:
        check(settings)
    except Unfit as error:
        log.warning("a probe failed", why=error.message)
        return False
    return True


def look(source: str) -> Look:
    """Return name, size and modification time of each file in a folder; an empty tuple if there is no folder."""
    try:
        found = [(path.name, path.stat()) for path in sorted(Path(source).iterdir())]
    except OSError:
        return ()
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


# Probe a judge's endpoint with the standard library only: the judge's own client loads torch.

_OPENAI = "https://api.openai.com/v1"
_PASSING = (408, 409, 429)  # statuses that may go away after a while, as 5xx may


class _StaysHere(HTTPRedirectHandler):
    """Follows no redirect, because the API key must reach only the configured server."""

    def redirect_request(self, *_: object) -> None:
        """Return None, so that the redirect is raised as an error."""


_OPENER = build_opener(_StaysHere)


def judge_answers(spec: JudgeSpec, key: str | None) -> bool:
    """Return True if an `llm` judge answers a request for one token.

    Errors that waiting cannot cure, such as a wrong key, count as an answer: the next job reports them.
    """
    asked = {"model": spec.model, "messages": [{"role": "user", "content": "Is the sky blue?"}], "max_tokens": 1}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key or 'none'}"}
    address = spec.base_url or os.environ.get("OPENAI_BASE_URL") or _OPENAI  # the judge's client reads it too
    url = f"{address.rstrip('/')}/chat/completions"
    request = Request(url, json.dumps(asked).encode(), headers)  # noqa: S310 - the provider's own address
    try:
        with _OPENER.open(request, timeout=spec.timeout_s):
            return True
    except HTTPError as error:
        return error.code < 500 and error.code not in _PASSING
    except (OSError, HTTPException):
        return False
