"""File an account's jobs with this service: upload their files and create each job exactly once, even after a crash.

A job at OpenAI is converted to the request for the same job here; notes name the settings that are not carried over.
The progress of a move is reported from its ledger alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypedDict

from app.move_in import NUMBERS
from app.move_in.api import Api, refusal
from app.move_in.ledger import Ledger, MoveInFailed, Record
from app.move_in.read import ENDED, Download, is_whole
from app.move_in.replies import GOLDEN, Plan, missing, model_jobs

_KNOWN = {"supervised": NUMBERS[:3], "dpo": NUMBERS}
_MOST_METADATA = 16  # pairs that a job may have
MOVED_FROM = "moved_from"


class NotThere(Exception):
    """A feature of the job does not exist here; the message names it."""


def map_request(job: Record, model: str, files: Record, auto: Collection[str] = ()) -> Record:
    """Return the request body of the same job on another model.

    `files` has the ids here of `training_file` and, if there is one, `validation_file`; hyperparameters in `auto` are
    left to the service. Raises `NotThere` for a method that does not exist here.
    """
    body = {"model": model, **files, "method": _method(job, auto)}
    if suffix := job_suffix(job):
        body["suffix"] = suffix
    if isinstance(job.get("seed"), int):
        body["seed"] = job["seed"]
    # One pair is left free for `moved_from`.
    kept = dict([*(job.get("metadata") or {}).items()][: _MOST_METADATA - 1])
    return {**body, "metadata": {**kept, MOVED_FROM: job["id"]}}


def job_suffix(job: Record) -> str | None:
    """Return a job's suffix, from the job or from its model's name; None if it has none."""
    said = job.get("user_provided_suffix") or job.get("suffix")
    parts = str(job.get("fine_tuned_model") or "").split(":")
    return said or (parts[3] or None if len(parts) == 5 else None)


def notes(job: Record) -> list[str]:
    """Return a note for each setting that is not carried over or has another meaning here."""
    found = _together_notes(job)
    if _numbers(job, _type(job)).get("learning_rate_multiplier") not in (None, "auto"):
        found.append("learning_rate_multiplier multiplies this service's own rate")
    if job.get("integrations"):
        found.append("integrations are not carried over")
    if len(job.get("metadata") or {}) >= _MOST_METADATA:
        found.append("the last pair of the metadata made way for moved_from")
    return found


def idempotency_key(body: Record, attempt: int) -> str:
    """Return the idempotency key of a request, with which the service creates one job however often it is sent."""
    text = json.dumps([body, attempt], sort_keys=True, ensure_ascii=False)
    return f"move-in-{hashlib.sha256(text.encode()).hexdigest()[:40]}"


def _method(job: Record, auto: Collection[str]) -> Record:
    kind = _type(job)
    if kind not in _KNOWN:
        raise NotThere(f"its method is {kind}, which is not trained here")
    numbers = {name: "auto" if name in auto else value for name, value in _numbers(job, kind).items()}
    return {"type": kind, kind: {"hyperparameters": numbers}}


def _type(job: Record) -> str:
    return str((job.get("method") or {}).get("type") or "supervised")


def _numbers(job: Record, kind: str) -> Record:
    """Return a job's hyperparameters; older jobs, without `method`, have them at the top level."""
    given = ((job.get("method") or {}).get(kind) or {}).get("hyperparameters") or job.get("hyperparameters") or {}
    return {name: given[name] for name in _KNOWN.get(kind, ()) if given.get(name) is not None}


def _together_notes(job: Record) -> list[str]:
    """Return a note for the settings of a job at Together that this service chooses itself."""
    given: Record = job.get("together") or {}
    kind: Record = given.get("training_type") or {}
    names = [name for name in ("learning_rate", "lr_scheduler", "warmup_ratio", "weight_decay") if given.get(name)]
    names += [name for name in ("lora_r", "lora_alpha") if kind.get(name)]
    found = [f"not carried over: {', '.join(names)}"] if names else []
    if kind.get("type") == "Full":
        found.append("all weights were trained; the new job trains an adapter")
    if given.get("from_checkpoint"):
        found.append("it started from a checkpoint; the new job starts from the base model")
    return found


POLL_S = 5.0
_FILES = 10_000  # files on a page


class Filing(TypedDict, total=False):
    """A job's request with its idempotency key, and its result: the created job or a refusal.

    `attempt` counts jobs that were filed again after a failure.
    """

    attempt: int
    body: Record
    key: str
    notes: list[str]
    job: Record
    refused: str


class NotYet(Exception):
    """A job cannot be filed now; the message says why."""


@dataclass(frozen=True, slots=True)
class JobFiler:
    """Files the jobs of a ledger with this service.

    `models` maps OpenAI's model names to names here, and `auto` are hyperparameters left to the service.
    """

    api: Api
    ledger: Ledger
    models: Mapping[str, str]
    auto: Collection[str]
    tell: Callable[[str], None]

    def file(self, job: Record, *, again: bool = False) -> Filing:
        """File a job unless it is filed already, and return the filing.

        `again` files it again if its job here has failed or was cancelled. Raises `NotYet` if it cannot be filed now.
        """
        known: Filing = self.ledger.get("filing", job["id"]) or Filing()
        if "job" in known and not (again and known["job"]["status"] in ("failed", "cancelled")):
            return known
        if "job" in known or "refused" in known or not known:
            known = self._prepare(job, known.get("attempt", 0) + ("job" in known))
            # Stored before it is sent: after a crash the same request with the same idempotency key is sent again.
            self.ledger.put("filing", job["id"], known)
        return self._send(job["id"], known)

    def refresh(self, old_id: str) -> Filing:
        """Update a filing with its job's current state, unless that has ended, and return it."""
        known: Filing = self.ledger.get("filing", old_id)
        if "job" in known and known["job"]["status"] not in ENDED:
            known["job"] = self.api.get(f"/fine_tuning/jobs/{known['job']['id']}")
            self.ledger.put("filing", old_id, known)
        return known

    def wait(self, old_ids: Collection[str]) -> None:
        """Wait until filed jobs have ended, and report each change of status."""
        waiting = dict.fromkeys(old_ids, "")
        while waiting:
            for old_id, before in list(waiting.items()):
                job = self.refresh(old_id).get("job")
                if job is None or job["status"] in ENDED:
                    del waiting[old_id]
                elif job["status"] != before:
                    waiting[old_id] = job["status"]
                if job and job["status"] != before:
                    self.tell(f"{old_id} -> {job['id']}: {job['status']}")
            if waiting:
                self.api.wait(POLL_S)

    def _prepare(self, job: Record, attempt: int) -> Filing:
        from openai import APIStatusError

        model = start_model(self.ledger, self.models, job)
        try:
            map_request(job, model, {})  # raises for unsupported jobs before any upload
            files = {name: self._upload(job[name]) for name in ("training_file", "validation_file") if job.get(name)}
            body = map_request(job, model, files, self.auto)
        except NotThere as error:
            raise NotYet(str(error)) from None
        except APIStatusError as error:
            raise NotYet(f"an upload was refused: {refusal(error)['message']}") from None
        return Filing(attempt=attempt, body=body, key=idempotency_key(body, attempt), notes=notes(job))

    def _send(self, old_id: str, filing: Filing) -> Filing:
        from openai import APIStatusError

        try:
            made = self.api.post("/fine_tuning/jobs", filing["body"], idempotency_key=filing["key"])
            found = Filing(**{**filing, "job": made})
        except APIStatusError as error:
            found = Filing(**{**filing, "refused": refusal(error)["message"]})
        self.ledger.put("filing", old_id, found)
        if "refused" in found:
            raise NotYet(f"the service refuses it: {found['refused']}")
        return found

    def _upload(self, file_id: str) -> str:
        """Return the id here of an account's file, which is uploaded unless an earlier upload still exists."""
        known: Download = self.ledger.get("download", file_id) or Download()
        if "sha256" not in known:
            raise NotYet(f"{file_id} was not downloaded: {known.get('problem', 'read the account first')}")
        if not is_whole(self.ledger.folder, known):
            raise NotYet(f"{known['path']} is not as it was downloaded; read the account again")
        found = self.api.call(lambda: self._found_or_sent(file_id, known))
        if found.get("bytes") != known["bytes"]:
            raise MoveInFailed(f"{file_id} has {known['bytes']} bytes, and {found.get('bytes')} arrived.")
        if found.get("status") == "error":
            raise NotYet(f"{file_id}: {found.get('status_details')} (all of it: spard files show {found['id']})")
        self.ledger.put("upload", file_id, found["id"])
        return str(found["id"])

    def _found_or_sent(self, file_id: str, known: Download) -> Record:
        """Return the uploaded file whose name is the old id, else upload it.

        An earlier upload may have succeeded even if its answer was lost.
        """
        name = f"{file_id}.jsonl"
        for each in self.api.pages("/files", _FILES):
            if (each.get("filename"), each.get("bytes"), each.get("status")) == (name, known["bytes"], "processed"):
                return each
        with (self.ledger.folder / known["path"]).open("rb") as content:
            return self.api.client.files.create(file=(name, content), purpose="fine-tune").to_dict()


def start_model(ledger: Ledger, models: Mapping[str, str], job: Record) -> str:
    """Return the model here that a job starts from: the mapped base model, or the model of an earlier filed job.

    Raises `NotYet` if no model is mapped, or the earlier job has not succeeded here.
    """
    asked = str(job.get("model"))
    if asked in models:
        return models[asked]
    maker = model_jobs(ledger).get(asked)
    if maker is None:
        raise NotYet(f"say which model here stands for {asked}: --model {asked}=NAME")
    made: Filing = ledger.get("filing", maker["id"]) or Filing()
    name = (made.get("job") or {}).get("fine_tuned_model")
    if not name:
        raise NotYet(f"it starts from the model of {maker['id']}, which is not trained here yet; file it again then")
    return str(name)


def to_file(ledger: Ledger, asked: Collection[str]) -> tuple[list[Record], dict[str, str]]:
    """Return the jobs to file, oldest first, and job id -> reason for the others.

    Without `asked` these are the jobs that succeeded. Raises `MoveInFailed` for an unknown id.
    """
    jobs: dict[str, Record] = ledger.all("job")
    if unknown := [each for each in asked if each not in jobs]:
        raise MoveInFailed(f"The account has no job {unknown[0]}; see `spard move-in status {ledger.folder}`.")
    chosen, left = [], {}
    for key, job in sorted(jobs.items(), key=lambda item: item[1].get("created_at") or 0):
        if key in asked or (not asked and job.get("status") == "succeeded"):
            chosen.append(job)
        elif not asked:
            left[key] = f"{job.get('status')} at OpenAI; name it with --job to file it"
    return chosen, left


def known_models(ledger: Ledger, given: Mapping[str, str], *, keep: bool) -> dict[str, str]:
    """Return the mapping from OpenAI's model names to names here: the `given` one over the stored one.

    `keep` stores the given one for later commands.
    """
    if keep:
        for old, new in given.items():
            ledger.put("model_here", old, new)
    return {**ledger.all("model_here"), **given}


def file_all(desk: JobFiler, jobs: Collection[Record], *, again: bool, wait: bool) -> bool:
    """File jobs, oldest first; return True if all were filed and none has failed or was cancelled.

    With `wait` each job is awaited before the next is filed, so a job can start from the model of an earlier one.
    """
    is_good = True
    for job in jobs:
        try:
            filing = desk.file(job, again=again)
        except NotYet as error:
            desk.tell(f"{job['id']} is not filed: {error}")
            is_good = False
            continue
        remarks = "".join(f"; {note}" for note in filing["notes"])
        desk.tell(f"{job['id']} -> {filing['job']['id']}: {filing['job']['status']}{remarks}")
        if wait:
            desk.wait([job["id"]])
    filed = [desk.refresh(job["id"]) for job in jobs if "job" in (desk.ledger.get("filing", job["id"]) or {})]
    return is_good and not any(each["job"]["status"] in ("failed", "cancelled") for each in filed)


def estimate(
    ledger: Ledger,
    models: Mapping[str, str],
    jobs: Collection[Record],
    auto: Collection[str],
    tell: Callable[[str], None],
) -> bool:
    """Report what filing would do, without any request to the service; return True if all jobs can be filed."""
    files, is_good = set[str](), True
    for job in jobs:
        known = ledger.get("filing", job["id"]) or {}
        if "job" in known:
            tell(f"{job['id']} is {known['job']['id']} here")
            continue
        names = [job[name] for name in ("training_file", "validation_file") if job.get(name)]
        try:
            base = start_model(ledger, models, job)
            body = map_request(job, base, {}, auto)
        except (NotYet, NotThere) as error:
            tell(f"{job['id']} would not be filed: {error}")
            is_good = False
            continue
        files |= {name for name in names if not ledger.has("upload", name)}
        numbers = body["method"][body["method"]["type"]]["hyperparameters"]
        said = ", ".join(f"{name} {value}" for name, value in numbers.items()) or "no hyperparameters"
        tell(f"{job['id']} would be filed on {base}: {body['method']['type']}, {said}")
    size = sum((ledger.get("download", each) or {}).get("bytes", 0) for each in files)
    tell(f"{len(files)} files of {size} bytes would be uploaded; a request for each file and job, and some to look")
    return is_good


# Report the progress of a move, from its ledger alone.


def summary(ledger: Ledger) -> Record:
    """Return the move's progress: counts of what was read, and an entry for each job."""
    downloads, jobs = ledger.all("download"), ledger.all("job")
    read = ledger.get("account", "read") or {}
    return {
        "account": ledger.get("account", "url"),
        "read_at": read.get("finished_at"),
        "jobs": len(jobs),
        "files": sum("sha256" in each for each in downloads.values()),
        "bytes": sum(each.get("bytes", 0) for each in downloads.values()),
        "not_downloaded": {key: each["problem"] for key, each in downloads.items() if "problem" in each},
        "moves": [_job_progress(ledger, job) for job in jobs.values()],
        "fine_tuned_models": len(model_jobs(ledger)),
    }


def _job_progress(ledger: Ledger, job: Record) -> Record:
    """Return one job's progress: its model's golden replies, and the job here."""
    old, filed = job.get("fine_tuned_model"), ledger.get("filing", job["id"]) or {}
    here = filed.get("job") or {}
    return {
        "job": job["id"],
        "status": job.get("status"),
        "model": old,
        "golden": _golden_progress(ledger, old) if old else None,
        "here": here.get("id"),
        "status_here": here.get("status") or ("refused" if "refused" in filed else None),
        "why": filed.get("refused") or (here.get("error") or {}).get("message"),
        "model_here": here.get("fine_tuned_model"),
        "notes": filed.get("notes") or [],
    }


def _golden_progress(ledger: Ledger, model: str) -> str | None:
    """Return "N of M" for a model's planned replies, without refused ones; None without a plan."""
    plan: Plan | None = ledger.get("plan", model)
    if plan is None:
        return None
    wanted = len(plan["prompts"]) * plan["replies"]
    return f"{wanted - len(missing(ledger, GOLDEN, model, plan, again=True))} of {wanted}"


def next_step(ledger: Ledger, found: Record) -> str:
    """Return the next command to run, with its reason."""
    folder, moves = ledger.folder, found["moves"]
    if found["read_at"] is None:
        return f"the account is not read to its end: spard move-in read {folder}"
    if any(each["model"] and not each["golden"] for each in moves):
        return f"keep golden replies while the old models answer: spard move-in golden {folder}"
    if any(each["status"] == "succeeded" and not each["here"] for each in moves):
        return f"file the jobs: spard move-in file {folder} --model OLD=NEW --wait"
    return f"compare: spard move-in compare {folder}"
