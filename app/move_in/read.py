"""Read an account into a ledger: models, jobs with their events and checkpoints, and files.

The account is at OpenAI, Azure or Together, and its lists get the form of OpenAI's objects. Azure's API has OpenAI's
paths and objects. Together's has `/fine-tunes` with its own names, which are converted; the object as Together sent it
stays under `together`. The forms are those of the packages openai 3.57 and together 3.1. Of a downloaded file the size
that the account lists is checked, and later the digest that was noted.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict
from urllib.parse import urlsplit

from app.move_in.api import Api, Source, refusal
from app.move_in.ledger import Ledger, MoveInFailed, Record
from spard.digests import file_sha256

History = Literal["events", "checkpoints"]
_HOSTS: Mapping[str, Source] = {
    ".openai.azure.com": "azure",
    ".cognitiveservices.azure.com": "azure",
    ".services.ai.azure.com": "azure",
    ".together.ai": "together",
    ".together.xyz": "together",
}
_JOBS_ON_PAGE, _FILES_ON_PAGE, _HISTORY_ON_PAGE = 100, 10_000, 100  # objects on a page
_STATUSES = {  # of Together's jobs; others are the same word or a job that still runs
    "completed": "succeeded",
    "error": "failed",
    "cancelled": "cancelled",
    "pending": "queued",
    "queued": "queued",
}
_METHODS = {"sft": "supervised", "dpo": "dpo"}
FILES = "files"
TRIES = 4  # downloads of a file whose size differs from the account's list
ENDED = ("succeeded", "failed", "cancelled")
_PURPOSES = ("fine-tune", "fine-tune-results")
_HISTORIES: tuple[History, ...] = ("events", "checkpoints")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,199}")


def find_source(base_url: str) -> Source:
    """Return whose API a base URL is by its host; `openai` for every other host."""
    host = f".{urlsplit(base_url).hostname or ''}"
    return next((source for ending, source in _HOSTS.items() if host.endswith(ending)), "openai")


class Account(Protocol):
    """The lists of an account."""

    def models(self) -> list[Record]:
        """Return the models that the account may ask."""
        ...

    def jobs(self) -> Iterator[Record]:
        """Yield all jobs, in the form of OpenAI's."""
        ...

    def files(self) -> Iterator[Record]:
        """Yield all files."""
        ...

    def history(self, job_id: str, name: History) -> list[Record]:
        """Return a job's events or checkpoints, as the API sends them."""
        ...


class OpenAIAccount:
    """An account whose API has OpenAI's paths, as Azure's has."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def models(self) -> list[Record]:
        """Return the models of `GET /models`."""
        return self._api.get("/models").get("data") or []

    def jobs(self) -> Iterator[Record]:
        """Yield the jobs of all pages of `GET /fine_tuning/jobs`."""
        return self._api.pages("/fine_tuning/jobs", _JOBS_ON_PAGE)

    def files(self) -> Iterator[Record]:
        """Yield the files of all pages of `GET /files`."""
        return self._api.pages("/files", _FILES_ON_PAGE)

    def history(self, job_id: str, name: History) -> list[Record]:
        """Return the objects of all pages of `GET /fine_tuning/jobs/ID/events` or `.../checkpoints`."""
        return list(self._api.pages(f"/fine_tuning/jobs/{job_id}/{name}", _HISTORY_ON_PAGE))


class TogetherAccount:
    """An account at Together; its lists have no pages, and its list of models needs a project, so jobs name them."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._listed: list[Record] | None = None

    def models(self) -> list[Record]:
        """Return the models that the account's jobs have made."""
        names = (job["fine_tuned_model"] for job in self.jobs())
        return [{"id": name, "object": "model", "owned_by": "together"} for name in names if name]

    def jobs(self) -> Iterator[Record]:
        """Yield the jobs of `GET /fine-tunes`, converted."""
        if self._listed is None:
            self._listed = [convert_job(job) for job in self._list("/fine-tunes")]
        return iter(self._listed)

    def files(self) -> Iterator[Record]:
        """Yield the files of `GET /files`, which have OpenAI's names."""
        return iter(self._list("/files"))

    def history(self, job_id: str, name: History) -> list[Record]:
        """Return the objects of `GET /fine-tunes/ID/events` or `.../checkpoints`."""
        return self._list(f"/fine-tunes/{job_id}/{name}")

    def _list(self, path: str) -> list[Record]:
        data = self._api.get(path).get("data")
        if not isinstance(data, list) or not all(isinstance(each, dict) for each in data):
            raise MoveInFailed(f"{self._api.url}{path} sends no list of objects under `data`.")
        return data


def open_account(api: Api) -> Account:
    """Return the account behind an API, with the paths that the API's provider uses."""
    return TogetherAccount(api) if api.source == "together" else OpenAIAccount(api)


def convert_job(job: Record) -> Record:
    """Convert a job from Together's form to OpenAI's; fields without an equivalent are only under `together`."""
    method: Record = job.get("training_method") or {}
    kind = _METHODS.get(str(method.get("method") or "sft"), str(method.get("method")))
    numbers = {
        "n_epochs": job.get("n_epochs"),
        "batch_size": job.get("batch_size"),
        "beta": method.get("dpo_beta") if kind == "dpo" else None,
    }
    status = str(job.get("status"))
    return {
        "id": job.get("id"),
        "object": "fine_tuning.job",
        "created_at": _unix_seconds(job.get("created_at")),
        "model": job.get("model"),
        "status": _STATUSES.get(status, "running"),
        "fine_tuned_model": job.get("model_output_name") if status == "completed" else None,
        "training_file": job.get("training_file") or None,
        "validation_file": job.get("validation_file") or None,
        "result_files": [],
        "seed": job.get("random_seed"),
        "suffix": job.get("suffix") or None,
        "method": {
            "type": kind,
            kind: {
                "hyperparameters": {name: value for name, value in numbers.items() if isinstance(value, int | float)}
            },
        },
        "together": job,
    }


def _unix_seconds(time: Any) -> int | None:
    """Return a time in ISO 8601 as seconds since 1970, which OpenAI's objects have; None if there is none."""
    try:
        return int(datetime.fromisoformat(str(time)).timestamp())
    except ValueError:
        return None


class Download(TypedDict, total=False):
    """A downloaded file's path below the folder, size and digest; or the `problem` that prevented the download."""

    path: str
    bytes: int
    sha256: str
    problem: str


def download(api: Api, folder: Path, file_id: str, file: Record) -> Download:
    """Download a file into the folder `files`; its final name appears only when it is complete."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", str(file.get("filename") or "file"))[-80:]
    target, part = (folder / FILES / each for each in (f"{file_id}-{name}", f"{file_id}.part"))
    part.parent.mkdir(mode=0o700, exist_ok=True)
    size = 0
    for _ in range(TRIES):
        size, digest = api.call(lambda: _fetch(api, file_id, part))
        if file.get("bytes") in (None, size):
            part.replace(target)
            return {"path": f"{FILES}/{target.name}", "bytes": size, "sha256": digest}
    part.unlink()
    return {"problem": f"{size} of {file['bytes']} bytes arrived, {TRIES} times"}


def is_whole(folder: Path, known: Download) -> bool:
    """Return True if a downloaded file exists with the size and digest that were noted."""
    path = folder / known.get("path", "")
    return path.is_file() and path.stat().st_size == known.get("bytes") and file_sha256(path) == known.get("sha256")


def _fetch(api: Api, file_id: str, part: Path) -> tuple[int, str]:
    """Download to the file `part` and return its size and SHA-256."""
    digest, size = hashlib.sha256(), 0
    with api.client.files.with_streaming_response.content(file_id) as response, part.open("wb") as out:
        part.chmod(0o600)
        for chunk in response.iter_bytes():
            digest.update(chunk)
            size += out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    return size, digest.hexdigest()


@dataclass(frozen=True, slots=True)
class AccountListing:
    """The models, jobs and files of an account, before any file is downloaded."""

    models: list[Record]
    jobs: list[Record]
    files: dict[str, Record]

    def wanted_files(self) -> list[str]:
        """Return the ids of all files to download: files for fine-tuning, and files that a job names."""
        own = [key for key, file in self.files.items() if file.get("purpose") in _PURPOSES]
        return list(dict.fromkeys([*own, *(_check_id(key) for job in self.jobs for key in job_file_ids(job))]))


def job_file_ids(job: Record) -> list[str]:
    """Return the ids of a job's training, validation and result files."""
    named = (job.get("training_file"), job.get("validation_file"), *(job.get("result_files") or []))
    return [key for key in named if key]


def same_account(api: Api, ledger: Ledger) -> None:
    """Raise `MoveInFailed` if the ledger belongs to an account at another URL."""
    known = ledger.get("account", "url")
    if known is not None and known != api.url:
        raise MoveInFailed(f"{ledger.folder} holds the account at {known}; read {api.url} into another folder.")


def list_account(api: Api) -> AccountListing:
    """Request the lists of models, jobs and files."""
    account = open_account(api)
    jobs = [_check_object(job) for job in account.jobs()]
    files = {_check_object(file)["id"]: file for file in account.files()}
    return AccountListing(account.models(), jobs, files)


def estimate(listed: AccountListing) -> str:
    """Return a sentence with the cost of reading an account, from its lists alone."""
    wanted = listed.wanted_files()
    size = sum(listed.files.get(key, {}).get("bytes") or 0 for key in wanted)
    least = len(wanted) + 2 * len(listed.jobs)
    jobs = f"{len(listed.jobs)} jobs with events and checkpoints, {len(listed.models)} models"
    return f"would read {jobs}, and {len(wanted)} files of {size} bytes: {least} requests or somewhat more"


def read_account(api: Api, ledger: Ledger, tell: Callable[[str], None]) -> AccountListing:
    """Update the ledger and its folder from an account, without downloading complete files again."""
    same_account(api, ledger)
    listed = list_account(api)
    ledger.put("account", "url", api.url)
    for kind, objects in (("model", listed.models), ("job", listed.jobs), ("file", [*listed.files.values()])):
        for each in objects:
            ledger.put(kind, each["id"], each)
    ledger.put("account", "offered", [each["id"] for each in listed.models])
    for job in listed.jobs:
        _read_job(api, ledger, job)
    wanted = listed.wanted_files()
    for number, file_id in enumerate(wanted, 1):
        got = _read_file(api, ledger, file_id)
        tell(f"[{number}/{len(wanted)}] {file_id}: {got}")
    ledger.put("account", "read", {"url": api.url, "finished_at": int(time.time()), "wanted": wanted})
    return listed


def _read_job(api: Api, ledger: Ledger, job: Record) -> None:
    """Read a job's events and checkpoints, unless they were read after it had ended."""
    from openai import APIStatusError

    key = job["id"]
    if (ledger.get("history", key) or {}).get("status") in ENDED:
        return
    history: Record = {"status": job.get("status")}
    for name in _HISTORIES:
        try:
            history[name] = open_account(api).history(key, name)
        except APIStatusError as error:
            history[name], history[f"{name}_refused"] = [], refusal(error)
    ledger.put("history", key, history)


def _read_file(api: Api, ledger: Ledger, file_id: str) -> str:
    """Download a file unless it is complete already; return the outcome as a text for the user."""
    from openai import APIStatusError

    known: Download | None = ledger.get("download", file_id)
    if known and is_whole(ledger.folder, known):
        return "there"
    try:
        file = ledger.get("file", file_id) or api.get(f"/files/{file_id}")
        ledger.put("file", file_id, file)
        found = download(api, ledger.folder, file_id, file)
    except APIStatusError as error:
        found = Download(problem=_words(refusal(error)))
    # A failed download does not replace the entry of an earlier complete one.
    if "problem" not in found or not (known and "sha256" in known):
        ledger.put("download", file_id, found)
    return found.get("problem") or f"{found['bytes']} bytes"


def _words(refused: Record) -> str:
    gone = refused["status"] in (404, 410)
    return "the account does not have it any more" if gone else f"refused: {refused['message']}"


def _check_object(found: Record) -> Record:
    """Return the object; raise `MoveInFailed` if its id is not safe as a file name."""
    _check_id(found.get("id"))
    return found


def _check_id(name: object) -> str:
    if not isinstance(name, str) or not _ID.fullmatch(name):
        raise MoveInFailed(f"The account names something {str(name)[:80]!r}, which is no id.")
    return name
