"""What a customer's script does with the official client, whichever major it has: run in that client's environment.

`python client.py URL CUSTOMER_KEY ADMIN_KEY` runs every check against a live service and prints a JSON object: for each
check `null`, or how it failed. Nothing of ours is imported: it is the unmodified client alone.
"""

from __future__ import annotations

import hashlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from queue import SimpleQueue
from threading import Thread
from typing import Any

import openai
from openai import OpenAI

ROWS = b"".join(
    json.dumps({"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "four"}]}).encode()
    + b"\n"
    for i in range(40)
)
BASE = "lab/tiny-1"


Event = tuple[bytes, dict[str, str]]


@contextmanager
def receiver() -> Iterator[tuple[str, SimpleQueue[Event]]]:
    """A customer's server: its address, and the events that it gets."""
    got: SimpleQueue[Event] = SimpleQueue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.put((body, {name.lower(): value for name, value in self.headers.items()}))
            self.send_response(204)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/", got
        server.shutdown()


class Checks:
    """Each method is one check; the service has one job that has succeeded, with checkpoints and an adapter."""

    def __init__(self, url: str, key: str, admin_key: str) -> None:
        self.api: Any = OpenAI(base_url=url, api_key=key, max_retries=0)
        self.admin: Any = OpenAI(base_url=url, api_key=admin_key, max_retries=0)

    def files(self) -> None:
        expiry = {"anchor": "created_at", "seconds": 3600}
        file = self.api.files.create(file=("a.jsonl", ROWS), purpose="fine-tune", expires_after=expiry)
        assert abs(file.expires_at - file.created_at - 3600) < 60
        assert self.api.files.wait_for_processing(file.id).status == "processed"
        assert self.api.files.retrieve(file.id).filename == "a.jsonl"
        assert self.api.files.content(file.id).read() == ROWS
        assert self.api.files.delete(file.id).deleted is True

    def files_are_listed_over_pages(self) -> None:
        made = [self._file() for _ in range(3)]
        listed = [file.id for file in self.api.files.list(limit=2, purpose="fine-tune")]
        assert listed[:3] == made[::-1]
        assert len(set(listed)) == len(listed)

    def an_upload_in_chunks(self) -> None:
        upload = self.api.uploads.upload_file_chunked(
            file=ROWS,
            filename="a.jsonl",
            bytes=len(ROWS),
            mime_type="text/jsonl",
            purpose="fine-tune",
            part_size=1000,
            md5=hashlib.md5(ROWS, usedforsecurity=False).hexdigest(),
        )
        assert upload.status == "completed"
        assert self.api.files.content(upload.file.id).read() == ROWS

    def an_upload_by_hand(self) -> None:
        upload = self.api.uploads.create(filename="a.jsonl", bytes=9, mime_type="text/jsonl", purpose="fine-tune")
        assert self.api.uploads.parts.create(upload.id, data=b"x").upload_id == upload.id
        assert self.api.uploads.cancel(upload.id).status == "cancelled"

    def a_job_s_life(self) -> None:
        extra = {"safety": {"defense": {"type": "spard", "tau": 0.2}}}
        method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2}}}
        job = self._job(method=method, metadata={"team": "a"}, seed=7, suffix="mine", extra_body=extra)
        assert (job.status, job.seed, job.hyperparameters.n_epochs, job.metadata) == ("queued", 7, 2, {"team": "a"})
        assert job.safety["defense"]["tau"] == 0.2
        assert self.api.fine_tuning.jobs.retrieve(job.id).id == job.id
        assert self.api.fine_tuning.jobs.pause(job.id).status == "paused"
        assert self.api.fine_tuning.jobs.resume(job.id).status == "queued"
        assert self.api.fine_tuning.jobs.cancel(job.id).status == "cancelled"

    def jobs_are_listed_over_pages_and_by_metadata(self) -> None:
        mine = {"client": openai.__version__}
        made = [self._job(metadata=mine).id for _ in range(3)]
        assert [job.id for job in self.api.fine_tuning.jobs.list(limit=2, metadata=mine)] == made[::-1]
        plain = self._job().id
        without = self.api.fine_tuning.jobs.list(extra_query={"metadata": "null"})
        assert plain in {job.id for job in without}
        assert not set(made) & {job.id for job in without}

    def hyperparameters_in_their_old_place(self) -> None:
        assert self._job(hyperparameters={"n_epochs": 3}).method.supervised.hyperparameters.n_epochs == 3

    def events_are_listed_over_pages(self) -> None:
        job = self._job()
        events = list(self.api.fine_tuning.jobs.list_events(job.id, limit=2))
        assert [event.message for event in events][-1] == f"Created fine-tuning job: {job.id}"
        assert {event.object for event in events} == {"fine_tuning.job.event"}

    def checkpoints_are_listed_over_pages(self) -> None:
        job = self._find_succeeded_job()
        found = list(self.api.fine_tuning.jobs.checkpoints.list(job.id, limit=2))
        assert [checkpoint.step_number for checkpoint in found] == [15, 10, 5]
        assert found[0].metrics.train_loss == 1.5

    def a_job_starts_from_a_checkpoint(self) -> None:
        name = next(
            iter(self.api.fine_tuning.jobs.checkpoints.list(self._find_succeeded_job().id))
        ).fine_tuned_model_checkpoint
        assert self.api.models.retrieve(name).id == name
        assert name not in {model.id for model in self.api.models.list()}
        job = self._job(model=name)
        assert self.api.fine_tuning.jobs.retrieve(job.id).model == name
        assert self.api.fine_tuning.jobs.cancel(job.id).status == "cancelled"

    def permissions_on_checkpoints(self) -> None:
        checkpoint = next(iter(self.api.fine_tuning.jobs.checkpoints.list(self._find_succeeded_job().id)))
        name, permissions = checkpoint.fine_tuned_model_checkpoint, self.admin.fine_tuning.checkpoints.permissions
        made = list(permissions.create(name, project_ids=["proj_a", "proj_b"]))
        assert [permission.project_id for permission in made] == ["proj_a", "proj_b"]
        listed = permissions.list(name, limit=1) if hasattr(permissions, "list") else permissions.retrieve(name).data
        assert {permission.project_id for permission in listed} == {"proj_a", "proj_b"}
        for permission in made:
            gone = permissions.delete(permission.id, fine_tuned_model_checkpoint=name)
            assert (gone.id, gone.deleted) == (permission.id, True)

    def results(self) -> None:
        job = self._find_succeeded_job()
        assert job.fine_tuned_model.startswith(f"ft:{BASE}:")
        first = self.api.files.content(job.result_files[0]).read().decode()
        assert first.startswith("step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy")

    def models(self) -> None:
        assert self.api.models.retrieve(BASE).object == "model"
        tuned = self._find_succeeded_job().fine_tuned_model
        assert {BASE, tuned} <= {model.id for model in self.api.models.list()}
        assert self.api.models.retrieve(tuned).owned_by == "org-customer"

    def the_last_thing_a_model_is_deleted(self) -> None:
        tuned = self._find_succeeded_job().fine_tuned_model
        assert self.api.models.delete(tuned).deleted is True
        self._fails(openai.NotFoundError, "model_not_found", lambda: self.api.models.retrieve(tuned))

    def a_request_that_is_sent_again_makes_one_job(self) -> None:
        ask = {"model": BASE, "training_file": self._file()}
        first = self.api.fine_tuning.jobs.create(**ask)
        again = self.api.fine_tuning.jobs.create(**ask, extra_headers={"x-stainless-retry-count": "1"})
        assert again.id == first.id
        keyed = [self.api.fine_tuning.jobs.create(**ask, extra_headers={"Idempotency-Key": first.id}) for _ in "ab"]
        assert len({job.id for job in keyed}) == 1

    def errors_have_the_client_s_classes(self) -> None:
        api, none = self.api, "file-0"
        self._fails(openai.NotFoundError, "file_not_found", lambda: api.files.retrieve(none))
        self._fails(openai.NotFoundError, "fine_tune_not_found", lambda: api.fine_tuning.jobs.retrieve("ftjob-0"))
        self._fails(openai.NotFoundError, "model_not_found", lambda: api.models.retrieve("ft:a/b:c::d"))
        self._fails(openai.BadRequestError, "model_not_found", lambda: self._job(model="gpt-7"))
        self._fails(openai.BadRequestError, "method_mismatch", lambda: self._job(method={"type": "dpo"}))
        self._fails(openai.BadRequestError, "method_not_supported", lambda: self._job(method={"type": "reinforcement"}))
        self._fails(
            openai.BadRequestError, "invalid_purpose", lambda: api.files.create(file=("a.jsonl", ROWS), purpose="batch")
        )
        wrong = api.with_options(api_key="sk-spard-wrong")
        self._fails(openai.AuthenticationError, "invalid_api_key", lambda: wrong.models.list())
        permissions = api.fine_tuning.checkpoints.permissions
        self._fails(
            openai.PermissionDeniedError, "insufficient_scope", lambda: permissions.create("a", project_ids=["b"])
        )

    def an_illegal_change_is_refused_and_not_sent_again(self) -> None:
        patient, job = self.api.with_options(max_retries=2), self._job()
        patient.fine_tuning.jobs.cancel(job.id)
        for wish in ("cancel", "pause", "resume"):
            change = getattr(patient.fine_tuning.jobs, wish)
            self._fails(openai.BadRequestError, "invalid_state", partial(change, job.id))

    def an_event_is_unwrapped(self) -> None:
        with receiver() as (url, got):
            made = self.api.post("/webhook_endpoints", body={"url": url}, cast_to=object)
            job = self._job()
            self.api.fine_tuning.jobs.cancel(job.id)
            body, headers = got.get(timeout=120)
            self.api.delete(f"/webhook_endpoints/{made['id']}", cast_to=object)
        event = self.api.webhooks.unwrap(body, headers, secret=made["secret"])
        assert (event.type, event.data.id) == ("fine_tuning.job.cancelled", job.id)
        try:
            self.api.webhooks.unwrap(body + b" ", headers, secret=made["secret"])
        except openai.InvalidWebhookSignatureError:
            return
        raise AssertionError("an altered event was taken")

    def graders_are_refused(self) -> None:
        grader = {"type": "string_check", "name": "a", "input": "a", "reference": "a", "operation": "eq"}
        graders = self.api.fine_tuning.alpha.graders
        self._fails(openai.BadRequestError, "method_not_supported", lambda: graders.validate(grader=grader))
        self._fails(
            openai.BadRequestError, "method_not_supported", lambda: graders.run(grader=grader, model_sample="a")
        )

    def _file(self) -> str:
        made: str = self.api.files.create(file=("a.jsonl", ROWS), purpose="fine-tune").id
        return made

    def _job(self, **ask: Any) -> Any:
        return self.api.fine_tuning.jobs.create(**{"model": BASE, "training_file": self._file(), **ask})

    def _find_succeeded_job(self) -> Any:
        return next(job for job in self.api.fine_tuning.jobs.list() if job.status == "succeeded")

    def _fails(self, kind: type[openai.APIStatusError], code: str, call: Callable[[], Any]) -> None:
        found: tuple[Any, ...] = (None,)
        try:
            call()
        except openai.APIStatusError as error:
            found = type(error), error.code, bool(error.request_id)
        assert found == (kind, code, True), f"{found}, expected {kind.__name__} with {code}"


NAMES = [name for name in vars(Checks) if not name.startswith("_")]


def main() -> None:
    """Run every check, the destructive one last."""
    checks = Checks(*sys.argv[1:4])
    outcome: dict[str, str | None] = {}
    for name in sorted(NAMES, key=lambda name: name.startswith("the_last")):
        try:
            getattr(checks, name)()
            outcome[name] = None
        except Exception:
            outcome[name] = traceback.format_exc(limit=-3)
    sys.stdout.write(json.dumps({"version": openai.__version__, "checks": outcome}))


if __name__ == "__main__":
    main()
