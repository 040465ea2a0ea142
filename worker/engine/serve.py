"""The engine's main loop: receive requests, send pieces of replies, and let waiting requests join between steps.

The folder of the base model is watched for changes. Weights on a CPU are memory-mapped from their files, so a write to
a file changes the model that answers.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from app.inference.protocol import BASE_MODEL_CHANGED
from spard.config.quantization import plain_digest
from spard.digests import file_identities, folder_digest
from spard.errors import SpardError, is_gpu_error, is_gpu_out_of_memory
from spard.models.base import Base
from worker.engine.adapters import Adapters, adapter_names, measured_conditions
from worker.engine.batch import BASE
from worker.engine.grammar import Forms
from worker.engine.replies import Rules, make_replies
from worker.engine.requests import FairQueue, LongPrompts, Prompts, QueuedRequest, Refused
from worker.engine.writer import UNREAD, Prompt, Seat, Tell, Writer

_FOLDER_LOOK_S = 1.0
log = logging.getLogger(__name__)
_FULL = "There is no memory for so many replies, or such long ones, at the moment."
_STOPPED = "The model could not go on with its replies; ask again."
_NO_FORMS = "response_format: this engine holds no reply to a schema."
_LONG = 8 << 10  # characters of a request's line; a shorter one is tokenized within 0.1 s, whatever its text
_STEPPED_S = 1.0  # between two messages that show that the loop is alive
_MASK_S = 0.05  # how long a step waits at most for the masks of schemas
_OTHERS_S = 0.01  # the same if several projects have rows; then the step goes on without the late reply


class WatchedFolder:
    """A watched model folder; create it before the model is read, so that changes during the read are noticed."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._seen, self._looked_at = file_identities(folder), clock()

    def look_next_time(self) -> None:
        """Make the next `has_changed` check the files, even if the last check was less than a second ago."""
        self._looked_at = -_FOLDER_LOOK_S

    def has_changed(self, digest: str) -> bool:
        """Return True if the files no longer have `digest`, the digest of the model as it was read.

        Sizes, inodes and times are compared at most once a second; only if they differ are the files hashed again, so
        files that were merely touched or copied do not count as changed.
        """
        if self._clock() - self._looked_at < _FOLDER_LOOK_S:
            return False
        self._looked_at = self._clock()
        try:
            found = file_identities(self._folder)
            if found == self._seen:
                return False
            is_same = folder_digest(self._folder) == digest
        except OSError:  # a file was removed
            return True
        if is_same:
            self._seen = found
        return not is_same


class Engine:
    """One base model with its adapters, and the replies that it is writing.

    base           the loaded model
    tell           sends a message to the API
    rows           the most replies that are written at the same time
    adapter_bytes  the most bytes of adapter weights to keep in memory
    long_prompts   tokenizes long prompts; without it the engine does so itself
    watched        the base model's folder; the engine ends when its files change
    forms          compiles JSON schemas; without it requests with one are refused
    """

    def __init__(
        self,
        base: Base,
        tell: Tell,
        rows: int,
        adapter_bytes: int,
        long_prompts: LongPrompts | None = None,
        watched: WatchedFolder | None = None,
        forms: Forms | None = None,
    ) -> None:
        self._watched, self._has_ended = watched, False
        self._base, self._tell = base, tell
        self._adapters, self._rules = Adapters(base, adapter_bytes), Rules(base)
        self._prompts, self._long = Prompts(base.tokenizer, self._rules.positions), long_prompts
        self._forms, self._waiting = forms, FairQueue()
        if forms:
            forms.logits = self._rules.logits
        self._writer = Writer(base.model, tell, rows, self._waiting, self._begin, self._forget)
        self._stepped_at = time.monotonic()
        tell({"kind": "ready", "digest": base.digest, "positions": self._rules.positions})

    def run(self, lines: SimpleQueue[Any]) -> None:
        """Serve the lines of a queue until None comes, the base model's files change, or a helper process ends."""
        while not self._has_ended:
            self._tell_stepped()
            try:
                line = lines.get(block=not self.is_busy, timeout=_STEPPED_S)
            except Empty:
                self.step()
                continue
            if line is None:
                return
            self.take(line)

    def take(self, line: Any) -> None:
        """Handle one line: load an adapter, or accept, continue or cancel a request."""
        match line["op"]:
            case "load":
                self._load(line["adapter"], Path(line["folder"]), line["manifest_sha256"])
            case "generate":
                if self._watched:
                    self._watched.look_next_time()  # no request is begun on files that were changed before it came
                self._accept(
                    QueuedRequest(line["id"], line["project"], line["ask"]), is_long=line.get("is_long", False)
                )
            case "read":
                self._note_read(line)
            case "cancel":
                self._cancel(line["id"])

    def step(self) -> None:
        """Let waiting requests join if there is room, and write one token of every reply.

        A failed step ends the requests in the batch. GPU errors other than lack of memory are raised.
        """
        if self._watched and self._watched.has_changed(plain_digest(self._base.digest)):
            return self._end_if_base_changed()
        try:
            self._step()
        except Exception as error:
            if is_gpu_out_of_memory(error):
                log.exception("the GPU has too little memory for the replies that are being written")
                self._fail_all("engine_busy", _FULL)
            elif is_gpu_error(error):  # after it, no GPU call works in this process any more
                raise
            else:
                log.exception("the replies that are being written cannot go on")
                self._fail_all("reply_failed", _STOPPED)
        return None

    @property
    def is_busy(self) -> bool:
        """Return True if any request is being answered or waits to be; long prompts being tokenized do not count."""
        return self._writer.is_busy or bool(self._waiting) or bool(self._forms and self._forms.is_busy)

    def _tell_stepped(self) -> None:
        """Send `stepped` once a second: the API kills an engine that stays silent."""
        if time.monotonic() - self._stepped_at >= _STEPPED_S:
            self._stepped_at = time.monotonic()
            self._tell({"kind": "stepped"})

    def _end_if_base_changed(self) -> None:
        """Fail all requests and end, because the weights may no longer be those on which the adapters were proved."""
        log.error("the folder of the base model has changed since it was read: the engine ends")
        self._writer.fail(
            {seat.replies[0].id for seat in self._writer.turns.seats}, "base_model_changed", BASE_MODEL_CHANGED
        )
        while self._waiting:
            self._fail(self._waiting.take().id, "base_model_changed", BASE_MODEL_CHANGED)
        self._has_ended = True

    def _step(self) -> None:
        self._receive_forms(0)
        deadline = time.monotonic() + (_OTHERS_S if self._writer.is_shared else _MASK_S)
        while not self._writer.is_ready and (left := deadline - time.monotonic()) > 0:
            self._receive_forms(left)
        if not self._writer.step():
            self._receive_forms(_MASK_S)  # every reply waits for a mask: do not spin

    def _receive_forms(self, timeout_s: float) -> None:
        """Receive messages of the schema processes; queue requests whose schema is compiled, fail refused ones."""
        if self._forms is None:
            return
        for waiting, error in self._forms.receive(timeout_s):
            if error:
                self._fail(waiting.id, error.code, error.message)
            else:
                self._waiting.add(waiting)
        self._has_ended = self._has_ended or self._forms.is_lost

    def _accept(self, waiting: QueuedRequest, *, is_long: bool) -> None:
        is_long = is_long and self._long is not None
        if not is_long and waiting.ask["json_schema"] is None:
            return self._waiting.add(waiting)
        digest = waiting.ask["adapter"]
        adapter = self._adapters.find(digest) if digest else None
        if digest and adapter is None:
            return self._tell({"kind": "absent", "id": waiting.id})
        if is_long and self._long:
            return self._long.add(waiting, *measured_conditions(adapter), self._rules.positions)
        return self._compile(waiting)

    def _note_read(self, line: Any) -> None:
        """Continue with a request whose long prompt is tokenized: fail it, compile its schema, or queue it."""
        waiting = self._long.take(line) if self._long else None
        if waiting and waiting.ids is None:
            self._fail(waiting.id, line["code"], line["message"])
        elif waiting and waiting.ask["json_schema"] is not None:
            self._compile(waiting)
        elif waiting:
            self._waiting.add(waiting)

    def _compile(self, waiting: QueuedRequest) -> None:
        if self._forms is None:
            return self._fail(waiting.id, "unsupported_parameter", _NO_FORMS)
        return self._forms.add(waiting, self._rules.ends(waiting.ask))

    def _begin(self, project: str) -> list[Seat]:
        """Return the seats of a project's next request; if it cannot be answered, fail it and return none."""
        waiting = self._waiting.pop(project)
        ask, digest = waiting.ask, waiting.ask["adapter"]
        adapter = self._adapters.use(digest) if digest else None
        if digest and adapter is None:
            self._forget(waiting.id)
            self._tell({"kind": "absent", "id": waiting.id})
            return []
        form = self._forms.form(waiting.id) if self._forms else None
        try:
            ids = waiting.ids or self._prompts.ids(ask, *measured_conditions(adapter))
            self._require_known(ids)
            replies = make_replies(self._base, waiting.id, ask, ids, self._rules, form)
        except SpardError as error:
            self._fail(waiting.id, error.code, error.message)
            return []
        except Exception:  # it is not in the batch yet, so the other requests go on
            log.exception("a request cannot be begun")
            self._fail(waiting.id, "reply_failed", UNREAD)
            return []
        # Sent before the prompt is read: meanwhile the API checks that the model is still released.
        self._tell({"kind": "started", "id": waiting.id, "prompt_tokens": len(ids)})
        self._writer.batch.model = self._adapters.model
        prompt = Prompt(ids, adapter.name if adapter else BASE)
        groups = [[reply] for reply in replies] if self._writer.batch.is_cut else [replies]
        return [Seat(group, project, prompt) for group in groups]

    def _require_known(self, ids: list[int]) -> None:
        """Raise `Refused` for a token without an embedding: on a GPU it ends in an error that breaks the process."""
        unknown = self._base.unknown_id(ids)
        if unknown is not None:
            token = self._base.tokenizer.decode([unknown])
            raise Refused("invalid_messages", f"The model's chat template writes {token!r}, which it does not know.")

    def _fail_all(self, code: str, message: str) -> None:
        """Fail all requests in the batch: after an error within a step, its rows may be inconsistent."""
        self._writer.fail(self._writer.numbers, code, message)
        torch.cuda.empty_cache()

    def _fail(self, number: int, code: str, message: str) -> None:
        """Fail a request that has no seats."""
        self._forget(number)
        self._tell({"kind": "failed", "id": number, "code": code, "message": message})

    def _forget(self, number: int) -> None:
        """Free a request's schema process."""
        if self._forms:
            self._forms.drop(number)

    def _cancel(self, number: int) -> None:
        self._waiting.drop(number)
        if self._long:
            self._long.drop(number)
        self._writer.drop({number})

    def _load(self, digest: str, folder: Path, manifest_sha256: str) -> None:
        try:
            known = self._adapters.find(digest)
            needed = adapter_names(self._writer.turns.adapters)
            proof = known.proof if known else self._adapters.load(digest, folder, manifest_sha256, needed)
            self._adapters.keep_for_next(digest)
        except (SpardError, OSError, ValueError, KeyError, RuntimeError) as error:
            log.exception("an adapter was not loaded")
            self._tell({"kind": "refused", "adapter": digest, "message": str(error).splitlines()[0][:500]})
        else:
            self._tell({"kind": "loaded", "adapter": digest, "proof": proof})
        self._writer.batch.model = self._adapters.model


def read_lines(stream: Any, lines: SimpleQueue[Any]) -> None:
    """Put the API's lines into a queue, each marked if it is long, and None at the end."""
    for line in stream:
        lines.put(json.loads(line) | {"is_long": len(line) > _LONG})
    lines.put(None)
