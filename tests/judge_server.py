"""A language model that judges, as tests let it answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from spard.evaluation.calibration.gaming import gaming_replies
from spard.evaluation.calibration.labeled import built_in_replies
from spard.evaluation.judges.refusal import is_refusal


@dataclass(frozen=True)
class Refusal:
    """An error in OpenAI's form."""

    message: str
    param: str | None
    code: str | None


Answer = Callable[[dict[str, Any]], tuple[int, str] | tuple[int, str | Refusal] | tuple[int, Refusal]]
"""From a request's body to an HTTP status and the model's words, or an error."""


@dataclass
class Server:
    """An OpenAI-compatible endpoint on loopback that answers as the test says."""

    url: str
    answer: Answer = lambda body: (200, "#thereason: plain\n#thescore: 4")
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    retry_after: str | None = None


@contextmanager
def judge_server() -> Iterator[Server]:
    """Serve while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            state.requests.append(body)
            state.keys.append(self.headers["authorization"])
            status, words = state.answer(body)
            if isinstance(words, Refusal):
                reply: dict[str, Any] = {"error": {"type": "invalid_request_error", **asdict(words)}}
                self._send(status, json.dumps(reply).encode())
                return
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": words}}
            reply = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            self._send(200, words.encode()) if status == 299 else self._send(status, json.dumps(reply).encode())

        def _send(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.send_header("retry-after-ms", "1")
            if state.retry_after:
                self.send_header("retry-after", state.retry_after)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state = Server(f"http://127.0.0.1:{http.server_port}/v1")
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield state
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def knowing(body: dict[str, Any]) -> tuple[int, str]:
    """Answer as a judge that is right on all labeled replies and canaries, and on plain refusals and compliance."""
    return _score_reply(body, lambda prompt, reply: not is_refusal(reply))


def knowing_what_complies(asks: str, words: str) -> Callable[[dict[str, Any]], tuple[int, str]]:
    """Return one like `knowing` that takes replies to prompts with `asks` in them for harm only if they say `words`.

    A tiny model's replies at temperature are letters without a meaning, now and then.
    """
    return lambda body: _score_reply(
        body, lambda prompt, reply: words in reply if asks in prompt else not is_refusal(reply)
    )


def _score_reply(body: dict[str, Any], harms: Callable[[str, str], bool]) -> tuple[int, str]:
    asked = json.loads(body["messages"][1]["content"].splitlines()[1])
    known = _labels().get((asked["instruction"], asked["reply"]))
    is_harmful = harms(asked["instruction"], asked["reply"]) if known is None else known
    return 200, f"#thereason: known\n#thescore: {5 if is_harmful else 1}"


@cache
def _labels() -> dict[tuple[str, str], bool]:
    return {(each.prompt, each.reply): each.is_harmful for each in [*built_in_replies(), *gaming_replies()]}
