"""Filing the jobs of an account here: files are uploaded, and each job is made once, whatever is killed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypedDict

from app.move_in.api import Api, refusal
from app.move_in.downloads import Download, is_whole
from app.move_in.golden import model_jobs
from app.move_in.ledger import Ledger, MoveInFailed, Record
from app.move_in.mapping import NotThere, idempotency_key, map_request, notes
from app.move_in.read import ENDED

POLL_S = 5.0
_FILES = 10_000  # of a page


class Filing(TypedDict, total=False):
    """A request as it is sent, and what came of it: a job or a refusal."""

    attempt: int
    body: Record
    key: str
    notes: list[str]
    job: Record
    refused: str


class NotYet(Exception):
    """A job is not filed; the message says why."""


@dataclass(frozen=True, slots=True)
class Desk:
    """Files jobs of a ledger with a service; `models` maps OpenAI's names of models to names here."""

    api: Api
    ledger: Ledger
    models: Mapping[str, str]
    auto: Collection[str]
    tell: Callable[[str], None]

    def file(self, job: Record, *, again: bool = False) -> Filing:
        """File a job unless it is; `again` files one anew whose job here has failed or was cancelled.

        `NotYet` if it cannot be filed, or not now.
        """
        known: Filing = self.ledger.get("filing", job["id"]) or Filing()
        if "job" in known and not (again and known["job"]["status"] in ("failed", "cancelled")):
            return known
        if "job" in known or "refused" in known or not known:
            known = self._prepare(job, known.get("attempt", 0) + ("job" in known))
            self.ledger.put("filing", job["id"], known)  # before it is sent: a kill then sends the same again
        return self._send(job["id"], known)

    def refresh(self, old_id: str) -> Filing:
        """Ask how a filed job stands."""
        known: Filing = self.ledger.get("filing", old_id)
        if "job" in known and known["job"]["status"] not in ENDED:
            known["job"] = self.api.get(f"/fine_tuning/jobs/{known['job']['id']}")
            self.ledger.put("filing", old_id, known)
        return known

    def wait(self, old_ids: Collection[str]) -> None:
        """Wait until filed jobs have ended, and tell how they stand when that changes."""
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
            map_request(job, model, {})  # before anything is uploaded
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
        """Return the id here of a file of the account: of the one that was sent before, if it is still there."""
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
        """Look for the file by its name here, which is its old id, before it is sent: an answer may have been lost."""
        name = f"{file_id}.jsonl"
        for each in self.api.pages("/files", _FILES):
            if (each.get("filename"), each.get("bytes"), each.get("status")) == (name, known["bytes"], "processed"):
                return each
        with (self.ledger.folder / known["path"]).open("rb") as content:
            return self.api.client.files.create(file=(name, content), purpose="fine-tune").to_dict()


def start_model(ledger: Ledger, models: Mapping[str, str], job: Record) -> str:
    """Return the model here that a job is to start from; `NotYet` if nobody has named it."""
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
    """Return the jobs to file, oldest first, and why others are not: they did not succeed, nobody asked for them."""
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
    """Return which model here stands for each of OpenAI's: as said now, else as said before."""
    if keep:
        for old, new in given.items():
            ledger.put("model_here", old, new)
    return {**ledger.all("model_here"), **given}


def file_all(desk: Desk, jobs: Collection[Record], *, again: bool, wait: bool) -> bool:
    """File jobs, oldest first, and wait for them if asked; whether all were filed and none has failed.

    A job that starts from another one's model waits for that one.
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
    """Tell what filing would do, without asking the service anything; return whether all would be filed."""
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
