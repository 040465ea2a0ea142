"""Read the lists of an account, at OpenAI, Azure or Together, in the form of OpenAI's objects.

Azure's API has OpenAI's paths and objects. Together's has `/fine-tunes` with its own names, which are converted; the
object as Together sent it stays under `together`. The forms are those of the packages openai 3.57 and together 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from app.move_in.api import Api, Source
from app.move_in.ledger import MoveInFailed, Record

History = Literal["events", "checkpoints"]

_HOSTS: Mapping[str, Source] = {
    ".openai.azure.com": "azure",
    ".cognitiveservices.azure.com": "azure",
    ".services.ai.azure.com": "azure",
    ".together.ai": "together",
    ".together.xyz": "together",
}
_JOBS, _FILES, _HISTORY = 100, 10_000, 100  # objects on a page
_STATUSES = {  # of Together's jobs; others are the same word or a job that still runs
    "completed": "succeeded",
    "error": "failed",
    "cancelled": "cancelled",
    "pending": "queued",
    "queued": "queued",
}
_METHODS = {"sft": "supervised", "dpo": "dpo"}


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
        return self._api.pages("/fine_tuning/jobs", _JOBS)

    def files(self) -> Iterator[Record]:
        """Yield the files of all pages of `GET /files`."""
        return self._api.pages("/files", _FILES)

    def history(self, job_id: str, name: History) -> list[Record]:
        """Return the objects of all pages of `GET /fine_tuning/jobs/ID/events` or `.../checkpoints`."""
        return list(self._api.pages(f"/fine_tuning/jobs/{job_id}/{name}", _HISTORY))


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
    """Return the account of an API."""
    return TogetherAccount(api) if api.source == "together" else OpenAIAccount(api)


def convert_job(job: Record) -> Record:
    """Return a job of Together's in the form of OpenAI's; what has no such form is only under `together`."""
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
