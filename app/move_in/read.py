"""Read an account into a ledger: models, jobs with their events and checkpoints, and files."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from app.move_in.accounts import History, open_account
from app.move_in.api import Api, refusal
from app.move_in.downloads import Download, download, is_whole
from app.move_in.ledger import Ledger, MoveInFailed, Record

ENDED = ("succeeded", "failed", "cancelled")
_PURPOSES = ("fine-tune", "fine-tune-results")
_HISTORY: tuple[History, ...] = ("events", "checkpoints")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,199}")


@dataclass(frozen=True, slots=True)
class Listed:
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


def list_account(api: Api) -> Listed:
    """Request the lists of models, jobs and files."""
    account = open_account(api)
    jobs = [_check_object(job) for job in account.jobs()]
    files = {_check_object(file)["id"]: file for file in account.files()}
    return Listed(account.models(), jobs, files)


def estimate(listed: Listed) -> str:
    """Return a sentence with the cost of reading an account, from its lists alone."""
    wanted = listed.wanted_files()
    size = sum(listed.files.get(key, {}).get("bytes") or 0 for key in wanted)
    least = len(wanted) + 2 * len(listed.jobs)
    jobs = f"{len(listed.jobs)} jobs with events and checkpoints, {len(listed.models)} models"
    return f"would read {jobs}, and {len(wanted)} files of {size} bytes: {least} requests or somewhat more"


def read_account(api: Api, ledger: Ledger, tell: Callable[[str], None]) -> Listed:
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
    for name in _HISTORY:
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
