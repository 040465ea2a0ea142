"""The engine's loop: requests in, pieces of replies out, and between two steps whoever waits may join."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from app.inference.protocol import BASE_MODEL_CHANGED, Said
from spard.config.quantization import plain_digest
from spard.errors import SpardError, is_gpu_error, is_gpu_out_of_memory
from spard.models.base import Base
from worker.engine.adapters import Adapters, measured_with, names_of
from worker.engine.batch import BASE, Batch, PromptUnread
from worker.engine.fair_queue import FairQueue, Waiting
from worker.engine.long_prompts import LongPrompts
from worker.engine.prompts import Prompts, Refused
from worker.engine.replies import Reply, Rules, replies_to
from worker.engine.watched import Watched

log = logging.getLogger(__name__)

_FULL = "There is no memory for so many replies, or such long ones, at the moment."
_UNREAD = "The model cannot read this prompt; others are not touched."
_STOPPED = "The model could not go on with its replies; ask again."
_BROKEN = "The model gives no numbers that a next token could be chosen from; its reply has ended."

_LONG = 8 << 10  # characters of a line: what is shorter becomes tokens in a tenth of a second, whatever it says

Tell = Callable[[Said], None]


class Engine:
    """One base model, its adapters, and the replies that are being written; `rows` is how many at once.

    Prompts that a line calls long are left to `long_prompts`, where it is given. The engine ends when the folder that
    is `watched` has changed.
    """

    def __init__(
        self,
        base: Base,
        tell: Tell,
        rows: int,
        adapter_bytes: int,
        long_prompts: LongPrompts | None = None,
        watched: Watched | None = None,
    ) -> None:
        self._watched, self._has_ended = watched, False
        self._base, self._tell, self._most = base, tell, rows
        self._adapters, self._rules = Adapters(base, adapter_bytes), Rules(base)
        self._prompts, self._long = Prompts(base.tokenizer, self._rules.positions), long_prompts
        self._batch = Batch(base.model)
        self._replies: list[Reply] = []
        self._waiting = FairQueue()
        self._done: dict[int, int] = {}  # tokens of ended replies, by request
        tell({"kind": "ready", "digest": base.digest, "positions": self._rules.positions})

    def run(self, lines: SimpleQueue[Any]) -> None:
        """Serve what comes until it ends with None, or the base model is no longer what was read."""
        while not self._has_ended:
            try:
                line = lines.get(block=not self.is_busy)
            except Empty:
                self.step()
                continue
            if line is None:
                return
            self.take(line)

    def take(self, line: Any) -> None:
        """Do or note what a line says."""
        match line["op"]:
            case "load":
                self._load(line["adapter"], Path(line["folder"]), line["manifest_sha256"])
            case "generate":
                self._take_in(Waiting(line["id"], line["project"], line["ask"]), is_long=line.get("is_long", False))
            case "read":
                self._note_read(line)
            case "cancel":
                self._cancel(line["id"])

    def step(self) -> None:
        """Let the next request join if there is room, and write a token into every reply."""
        if self._watched and self._watched.has_changed(plain_digest(self._base.digest)):
            return self._end_if_base_changed()
        try:
            self._go_on()
        except Exception as error:
            if is_gpu_out_of_memory(error):
                log.exception("the GPU has too little memory for the replies that are being written")
                self._give_up("engine_busy", _FULL)
            elif is_gpu_error(error):  # after which nothing works on it in this process
                raise
            else:
                log.exception("the replies that are being written cannot go on")
                self._give_up("reply_failed", _STOPPED)
        return None

    def _end_if_base_changed(self) -> None:
        """End all requests: the weights may be others by now than those that adapters were proved on."""
        log.error("the folder of the base model has changed since it was read: the engine ends")
        self._give_up("base_model_changed", BASE_MODEL_CHANGED)
        while self._waiting:
            number = self._waiting.take().id
            self._tell({"kind": "failed", "id": number, "code": "base_model_changed", "message": BASE_MODEL_CHANGED})
        self._has_ended = True

    def _go_on(self) -> None:
        waiting = self._next()
        if waiting:
            self._begin(waiting)
        if self._replies:
            self._write()

    @property
    def is_busy(self) -> bool:
        """Whether replies are being written or wait for it."""
        return bool(self._replies or self._waiting)

    def _take_in(self, waiting: Waiting, *, is_long: bool) -> None:
        if self._long is None or not is_long:
            return self._waiting.add(waiting)
        digest = waiting.ask["adapter"]
        adapter = self._adapters.find(digest) if digest else None
        if digest and adapter is None:
            return self._tell({"kind": "absent", "id": waiting.id})
        return self._long.add(waiting, *measured_with(adapter), self._rules.positions)

    def _note_read(self, line: Any) -> None:
        """Let a request whose long prompt was read wait for its turn, or end it where the prompt was refused."""
        waiting = self._long.taken(line) if self._long else None
        if waiting and waiting.ids is None:
            self._tell({"kind": "failed", "id": waiting.id, "code": line["code"], "message": line["message"]})
        elif waiting:
            self._waiting.add(waiting)

    def _next(self) -> Waiting | None:
        """Return the request of the project whose turn it is."""
        if not self._waiting:
            return None
        room = self._most - len(self._replies)
        if self._replies and (self._waiting.next.ask["n"] > room or not self._batch.can_join):
            return None
        return self._waiting.take()

    def _begin(self, waiting: Waiting) -> None:
        ask, digest = waiting.ask, waiting.ask["adapter"]
        adapter = self._adapters.find(digest) if digest else None
        if digest and adapter is None:
            return self._tell({"kind": "absent", "id": waiting.id})
        try:
            ids = waiting.ids or self._prompts.ids(ask, *measured_with(adapter))
            self._require_known(ids)
            replies = replies_to(self._base, waiting.id, ask, ids, self._rules)
        except SpardError as error:
            return self._tell({"kind": "failed", "id": waiting.id, "code": error.code, "message": error.message})
        except Exception:  # nothing of it is with the others yet
            log.exception("a request cannot be begun")
            return self._tell({"kind": "failed", "id": waiting.id, "code": "reply_failed", "message": _UNREAD})
        # Told before the prompt is read: whoever asked checks meanwhile that the model is released still.
        self._tell({"kind": "started", "id": waiting.id, "prompt_tokens": len(ids)})
        self._batch.model = self._adapters.model
        self._replies += replies
        try:
            self._batch.join(ids, adapter.name if adapter else BASE, ask["n"])
        except PromptUnread:
            log.exception("a prompt cannot be read")
            self._replies = self._replies[: -len(replies)]
            self._tell({"kind": "failed", "id": waiting.id, "code": "reply_failed", "message": _UNREAD})
        return None

    def _require_known(self, ids: list[int]) -> None:
        """Refuse a prompt with a token that the weights have no embedding for: a GPU would be lost to all by it."""
        unknown = self._base.unknown_id(ids)
        if unknown is not None:
            token = self._base.tokenizer.decode([unknown])
            raise Refused("invalid_messages", f"The model's chat template writes {token!r}, which it does not know.")

    def _give_up(self, code: str, message: str) -> None:
        """End all replies as failed: after an error in a step the batch may hold only some of its tokens."""
        self._fail({reply.id for reply in self._replies}, code, message)
        torch.cuda.empty_cache()

    def _fail(self, numbers: Collection[int], code: str, message: str) -> None:
        """End requests as failed, with all of their replies."""
        for number in sorted(numbers):
            self._tell({"kind": "failed", "id": number, "code": code, "message": message})
            self._done.pop(number, None)
        self._keep([i for i, reply in enumerate(self._replies) if reply.id not in numbers])

    def _write(self) -> None:
        tokens, broken = dict[Reply, int](), set[int]()
        for reply, logits_V in zip(self._replies, self._batch.logits_BV, strict=True):
            try:
                tokens[reply], said = reply.advance(logits_V)
            except Exception:  # numbers of one row, in main memory: whatever is wrong with them ends its request alone
                log.exception("a reply cannot go on")
                broken.add(reply.id)
                continue
            if said:
                self._tell(said)
        self._fail(broken, "reply_failed", _BROKEN)
        left = [i for i, reply in enumerate(self._replies) if reply.finish is None]
        ended = [reply for reply in self._replies if reply.finish is not None]
        self._keep(left)
        for number in dict.fromkeys(reply.id for reply in ended):
            self._tell_done(number, ended)
        if left:
            self._batch.step([tokens[reply] for reply in self._replies])

    def _tell_done(self, number: int, ended: list[Reply]) -> None:
        """Tell the end of a request once all of its replies have ended."""
        self._done[number] = self._done.get(number, 0) + sum(r.written for r in ended if r.id == number)
        if all(reply.id != number for reply in self._replies):
            self._tell({"kind": "done", "id": number, "reply_tokens": self._done.pop(number)})

    def _cancel(self, number: int) -> None:
        self._waiting.drop(number)
        if self._long:
            self._long.drop(number)
        self._keep([i for i, reply in enumerate(self._replies) if reply.id != number])
        self._done.pop(number, None)

    def _keep(self, places: list[int]) -> None:
        self._batch.keep(places)
        self._replies = [self._replies[i] for i in places]

    def _load(self, digest: str, folder: Path, manifest_sha256: str) -> None:
        try:
            known = self._adapters.find(digest)
            needed = names_of(self._batch.names)
            proof = known.proof if known else self._adapters.load(digest, folder, manifest_sha256, needed)
        except (SpardError, OSError, ValueError, KeyError, RuntimeError) as error:
            log.exception("an adapter was not loaded")
            self._tell({"kind": "refused", "adapter": digest, "message": str(error).splitlines()[0][:500]})
        else:
            self._tell({"kind": "loaded", "adapter": digest, "proof": proof})
        self._batch.model = self._adapters.model


def read_lines(stream: Any, lines: SimpleQueue[Any]) -> None:
    """Put what the API says into a queue, and None at its end."""
    for line in stream:
        lines.put(json.loads(line) | {"is_long": len(line) > _LONG})
    lines.put(None)
