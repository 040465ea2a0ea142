"""Every request that writes or deletes objects, and what must be true once it has succeeded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

from sqlalchemy import Engine, select, update

from app import keys, objects, retention, uploads
from app.catalog import imports, removal
from app.catalog import service as catalog
from app.db import read, transaction
from app.db.base import new_id, utc_now
from app.db.tables import (
    Corpus,
    DeletedModel,
    File,
    Job,
    JobStatus,
    ObjectIntent,
    SweptJob,
    Upload,
    UploadPart,
)
from app.files import upload
from app.files.validation import Limits
from app.http.bodies import Form
from app.jobs import erasure
from app.objects import reconciler
from app.storage import Storage
from app.uploads import UploadComplete, UploadCreate
from tests.app.http.conftest import chat, jsonl, pool, rows
from tests.app.parts import SPEC
from tests.faults.cuts import HurtStorage, Steps, hurt_commits, make_begin

LIMITS = Limits(1 << 30, 1 << 20, 10_000)
_AT_ONCE = timedelta(seconds=-5)  # as if the time had passed
_AGO = timedelta(days=-1)


@dataclass(frozen=True)
class Request:
    """`ask` may be repeated as clients do; `prove` raises AssertionError if the success that it returned was none."""

    ask: Callable[[], Any]
    prove: Callable[[Any], None]


class Warehouse:
    """A project with files, uploads and jobs, and a provider with pools and suites."""

    def __init__(self, engine: Engine, storage: Storage) -> None:
        self.engine, self.plain, self.steps = engine, storage, Steps()
        hurt_commits(engine, self.steps)
        self.storage, self.begin = HurtStorage(storage, self.steps), make_begin(engine)
        self._numbers = count(10)
        with transaction(engine) as session:
            keys.ensure_first(session, None)
            self._key, _ = keys.create(session, keys.FIRST_PROJECT, "test", ["customer"])
        self.project = self._key.project_id

    def requests(self) -> dict[str, Callable[[], Request]]:
        """What can be asked for; each makes ready what it needs."""
        return {
            "POST /files": self._upload,
            "POST /files/{id}/convert": self._convert,
            "DELETE /files/{id}": self._delete_file,
            "POST /uploads/{id}/parts": self._part,
            "POST /uploads/{id}/complete": self._complete,
            "POST /uploads/{id}/cancel": self._cancel,
            "uploads that expire": self._expire,
            "POST /admin/pools": self._import_pool,
            "POST /admin/pools, lost bytes again": self._import_lost_pool,
            "DELETE /admin/pools/{id}": self._delete_pool,
            "POST /admin/suites": self._import_suite,
            "DELETE /admin/suites/{id}": self._delete_suite,
            "DELETE /jobs/{id}?include_files": self._erase,
            "DELETE /models/{model}": self._delete_model,
            "files that expire, attempts that are swept": self._sweep_old,
        }

    def sweep(self) -> None:
        """As a day later."""
        with self.begin() as session:
            uploads.expire(session)
        for _ in range(2):
            objects.sweep(self.storage, self.begin, writes_stay=_AT_ONCE)

    def wrong(self) -> list[str]:
        """Whatever rows and objects do not agree on, by the rows, by the reconciler, and by the intents left."""
        there = {item.key for item in self.plain.list()} - {reconciler.MARK_KEY}
        with read(self.engine) as session:
            named = set(self._named_keys(session))
            wrong = [f"intent left: {key}" for key in session.scalars(select(ObjectIntent.storage_key))]
        wrong += [f"no row: {key}" for key in there - named] + [f"no object: {key}" for key in named - there]
        found = reconciler.check(self.plain, self.begin, young=_AGO).findings
        return wrong + [f"reconciler: {each.kind} {each.storage_key}: {each.why}" for each in found]

    def _named_keys(self, session: Any) -> Iterator[str]:
        yield from session.scalars(select(File.storage_key))
        yield from session.scalars(select(Corpus.storage_key).where(Corpus.deleted_at.is_(None)))
        is_open = Upload.status == "pending"
        yield from session.scalars(select(UploadPart.storage_key).join_from(UploadPart, Upload).where(is_open))
        gone = set(session.scalars(select(DeletedModel.job_id)))
        for job in session.scalars(select(Job)):
            yield job.report_key
            if job.id not in gone:
                yield job.adapter["storage_key"]

    def content(self) -> bytes:
        return rows(next(self._numbers))

    def _upload(self) -> Request:
        content = self.content()
        return Request(
            lambda: upload.upload(self.storage, self.begin, self.project, form(content, purpose="fine-tune"), LIMITS),
            lambda file: self._is_there(File, file.id, content),
        )

    def _convert(self) -> Request:
        talk = [{"from": "human", "value": f"{next(self._numbers)}?"}, {"from": "gpt", "value": "four"}]
        file = self._file(jsonl(*[{"conversations": talk}] * 10))
        content = jsonl(*[chat(talk[0]["value"])] * 10)
        return Request(
            lambda: upload.convert_file(self.storage, self.begin, file, LIMITS),
            lambda made: self._is_there(File, made.file.id, content),
        )

    def _delete_file(self) -> Request:
        file = self._file(self.content())
        return Request(
            lambda: erasure.delete_file(self.storage, self.begin, self.project, file.id),
            lambda _: self._is_gone(file.storage_key),
        )

    def _part(self) -> Request:
        content = self.content()
        upload_id = self._announce(3 * len(content))
        return Request(
            lambda: uploads.receive_part(self.storage, self.begin, self.project, upload_id, form(content, "data")),
            lambda part: self._is_there(UploadPart, part.id, content),
        )

    def _complete(self) -> Request:
        content = self.content()
        upload_id, prefix, ids = self._send_upload(content)

        def prove(done: Any) -> None:
            assert done.status == "completed"
            self._is_there(File, done.file.id, content)
            self._is_gone(prefix)

        ask = UploadComplete(part_ids=ids)
        return Request(lambda: uploads.complete(self.storage, self.begin, self.project, upload_id, ask, LIMITS), prove)

    def _cancel(self) -> Request:
        upload_id, prefix, _ = self._send_upload(self.content())
        return Request(
            lambda: uploads.cancel(self.storage, self.begin, self.project, upload_id), lambda _: self._is_gone(prefix)
        )

    def _expire(self) -> Request:
        upload_id, *_ = self._send_upload(self.content())
        with self.begin() as session:
            session.execute(update(Upload).where(Upload.id == upload_id).values(expires_at=utc_now() + _AGO))
        return Request(lambda: uploads.sweep(self.storage, self.begin), lambda _: None)

    def _import_pool(self) -> Request:
        return self._importing(pool(100 + next(self._numbers)))

    def _import_lost_pool(self) -> Request:
        content = pool(100 + next(self._numbers))
        made = self._importing(content).ask()
        with read(self.engine) as session:
            for corpus in catalog.versions(session, made.id):
                self.plain.delete(corpus.storage_key)
        return self._importing(content)

    def _importing(self, content: bytes) -> Request:
        def prove(made: Any) -> None:
            with read(self.engine) as session:
                kept = catalog.versions(session, made.id)
            assert len(kept) == 2
            assert all(self.plain.size(corpus.storage_key) == corpus.bytes for corpus in kept)

        return Request(lambda: imports.import_pool(self.storage, self.begin, form(content), "general", LIMITS), prove)

    def _delete_pool(self) -> Request:
        made = self._importing(pool(100 + next(self._numbers))).ask()
        with read(self.engine) as session:
            kept = [corpus.storage_key for corpus in catalog.versions(session, made.id)]
        return Request(
            lambda: removal.delete(self.storage, self.begin, made.id, removal.forget_pool),
            lambda _: self._is_gone(*kept),
        )

    def _import_suite(self) -> Request:
        content = jsonl(*({"prompt": f"Harm {next(self._numbers)}?"} for _ in range(30)))

        def ask() -> Any:
            return imports.import_suite(self.storage, self.begin, form(content), "redteam", "harmful", LIMITS)

        return Request(ask, lambda made: self._is_there(Corpus, made.id, content))

    def _delete_suite(self) -> Request:
        made = self._import_suite().ask()
        return Request(
            lambda: removal.delete(self.storage, self.begin, made.id, removal.forget_suite),
            lambda _: self._is_gone(f"corpora/{made.id}"),
        )

    def _erase(self) -> Request:
        job, file = self._job()
        return Request(
            lambda: erasure.erase(self.storage, self.begin, self.project, job.id, include_files=True),
            lambda gone: self._is_gone(f"tenants/{self.project}/jobs/{job.id}", file.storage_key),
        )

    def _delete_model(self) -> Request:
        job, _ = self._job()
        assert job.adapter
        key = job.adapter["storage_key"]
        return Request(
            lambda: erasure.delete_model(self.storage, self.begin, self.project, str(job.fine_tuned_model)),
            lambda _: self._is_gone(key),
        )

    def _sweep_old(self) -> Request:
        self._job()
        file = self._file(self.content())
        with self.begin() as session:
            session.get_one(File, file.id).expires_at = utc_now() + _AGO

        def ask() -> None:
            retention.sweep_files(self.begin)
            retention.sweep_attempts(self.begin, stay=_AT_ONCE)
            objects.sweep(self.storage, self.begin, writes_stay=timedelta(days=1))

        return Request(ask, lambda _: None)

    def _file(self, content: bytes) -> File:
        return upload.upload(self.storage, self.begin, self.project, form(content, purpose="fine-tune"), LIMITS)

    def _announce(self, size: int) -> str:
        ask = UploadCreate(filename="train.jsonl", purpose="fine-tune", bytes=size, mime_type="text/jsonl")
        with self.begin() as session:
            return uploads.create(session, self.project, ask, LIMITS.bytes).id

    def _send_upload(self, content: bytes) -> tuple[str, str, list[str]]:
        """An upload with two parts: its id, their prefix, their ids."""
        upload_id = self._announce(len(content))
        sent = [
            uploads.receive_part(self.storage, self.begin, self.project, upload_id, form(piece, "data"))
            for piece in (content[:100], content[100:])
        ]
        return upload_id, sent[0].storage_key.rpartition("/")[0], [part.id for part in sent]

    def _job(self) -> tuple[Job, File]:
        """A job whose second attempt was published; the first has left something, the second a checkpoint."""
        file, job_id = self._file(self.content()), new_id("ftjob-")
        prefix = f"tenants/{self.project}/jobs/{job_id}"
        keys = [f"{prefix}/{name}" for name in ("a2/out/adapter.tar.gz", "a2/out/report.json", "a1/out/metrics.csv")]
        for key in keys:
            self.plain.write(key, [b"x"])
        adapter = {"storage_key": keys[0], "sha256": "0", "bytes": 1}
        asked = {"model": "tiny", "training_file": file.id, "recipe": {}, "spec": SPEC, "request_hash": "0"}
        ended = {"status": JobStatus.succeeded, "finished_at": utc_now(), "lease_token": 2, "report_key": keys[1]}
        owned = {"project_id": self.project, "key_id": self._key.id, "fine_tuned_model": f"ft:tiny::{job_id}"}
        with self.begin() as session:
            job = Job(id=job_id, adapter=adapter, **asked, **ended, **owned)
            session.add(job)
        return job, file

    def forget_attempts(self) -> None:
        """Sweep what first attempts have left, so that every object has a row that names it."""
        retention.sweep_attempts(self.begin, stay=_AT_ONCE)
        with read(self.engine) as session:
            assert set(session.scalars(select(Job.id))) == set(session.scalars(select(SweptJob.job_id)))

    def _is_there(self, table: type[Any], row_id: str, content: bytes) -> None:
        with read(self.engine) as session:
            key = session.get_one(table, row_id).storage_key
        assert b"".join(self.plain.chunks(key)) == content

    def _is_gone(self, *keys: str) -> None:
        for key in keys:
            assert not self.plain.exists(key)
            assert not list(self.plain.list(key))


def form(content: bytes, part: str = "file", **fields: str) -> Form:
    """What a client sends."""
    head = "".join(
        f'--cut\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()
    )
    head += f'--cut\r\ncontent-disposition: form-data; name="{part}"; filename="train.jsonl"\r\n\r\n'
    body = head.encode() + content + b"\r\n--cut--\r\n"
    return Form("multipart/form-data; boundary=cut", [body], part, len(body))
