"""An account of OpenAI's form on loopback, and a service that takes jobs; with faults that a test orders."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Json = dict[str, Any]
Fault = Callable[[], tuple[int, Json, dict[str, str]] | str | None]
"""A status with body and headers; "cut", "short" or "lost" for a body that breaks off; None for the right answer."""


def row(question: str, answer: str) -> bytes:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages}).encode() + b"\n"


def once(*faults: tuple[int, Json, dict[str, str]] | str) -> Fault:
    """Each of the faults once, then the right answer."""
    left = list(faults)
    return lambda: left.pop(0) if left else None


def error(message: str, code: str | None = None) -> Json:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


@dataclass
class Stub:
    """Its state; tests change it as they like."""

    url: str = ""
    prefix: str = "/v1"
    header: str = "authorization"  # of the key: `authorization`, or Azure's `api-key`
    api_version: str | None = None  # Azure's, which each request must name
    deployments: dict[str, str] = field(default_factory=dict)  # Azure's: the model behind each name
    files: dict[str, Json] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)
    jobs: dict[str, Json] = field(default_factory=dict)
    events: dict[str, list[Json]] = field(default_factory=lambda: defaultdict(list))
    checkpoints: dict[str, list[Json]] = field(default_factory=lambda: defaultdict(list))
    models: list[str] = field(default_factory=list)
    faults: dict[str, Fault] = field(default_factory=dict)
    page: int = 100
    key: str = "sk-a-key-of-tests"
    say: Callable[[Json, int], str] = lambda body, n: f"reply to {body['messages'][-1]['content']}"
    requests: list[tuple[str, str]] = field(default_factory=list)
    bodies: list[Json] = field(default_factory=list)
    by_key: dict[str, str] = field(default_factory=dict)
    ends: str = "succeeded"
    lock: threading.Lock = field(default_factory=threading.Lock)
    asked: Counter[str] = field(default_factory=Counter)

    def add_file(self, name: str, content: bytes, purpose: str = "fine-tune", key: str = "") -> str:
        key = key or f"file-{len(self.files):03}"
        facts = {"object": "file", "created_at": 1, "status": "processed", "purpose": purpose}
        self.files[key] = {"id": key, "bytes": len(content), "filename": name, **facts}
        self.contents[key] = content
        return key

    def add_job(self, key: str, training_file: str, **fields: Any) -> Json:
        job = {
            "id": key,
            "object": "fine_tuning.job",
            "created_at": len(self.jobs),
            "model": "gpt-old",
            "status": "succeeded",
            "fine_tuned_model": f"ft:gpt-old:org:{key[-1]}:{key}",
            "training_file": training_file,
            "validation_file": None,
            "result_files": [],
            "seed": 7,
            "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 3, "batch_size": 2}}},
            **fields,
        }
        self.jobs[key] = job
        if job["fine_tuned_model"]:
            self.models.append(job["fine_tuned_model"])
        return job

    def count(self, pattern: str) -> int:
        return sum(re.fullmatch(pattern, f"{method} {path}") is not None for method, path in self.requests)

    def page_items(self, items: list[Json], query: dict[str, list[str]]) -> Json:
        size = min(self.page, int(query.get("limit", ["20"])[0]))
        after = query.get("after", [None])[0]
        start = next((i + 1 for i, each in enumerate(items) if each["id"] == after), 0)
        return {"object": "list", "data": items[start : start + size], "has_more": start + size < len(items)}

    def get(self, path: str, query: dict[str, list[str]]) -> Json | bytes | None:
        match path.strip("/").split("/"):
            case ["models"]:
                return {"object": "list", "data": [{"id": each, "object": "model"} for each in self.models]}
            case ["files"]:
                return self.page_items([*self.files.values()], query)
            case ["files", key, "content"]:
                return self.contents.get(key)
            case ["files", key]:
                return self.files.get(key)
            case ["fine_tuning", "jobs"]:
                return self.page_items([*self.jobs.values()], query)
            case ["fine_tuning", "jobs", key]:
                return self._advance(self.jobs.get(key))
            case ["fine_tuning", "jobs", key, "events"]:
                return self.page_items(self.events[key], query)
            case ["fine_tuning", "jobs", key, "checkpoints"]:
                return self.page_items(self.checkpoints[key], query)
        return None

    def _advance(self, job: Json | None) -> Json | None:
        """A job that is asked for is one status further."""
        if job and job["status"] == "queued":
            job["status"] = "running"
        elif job and job["status"] == "running":
            job["status"] = self.ends
            if self.ends == "succeeded":
                job["fine_tuned_model"] = f"ft:{job['model']}:here::{job['id']}"
                self.models.append(job["fine_tuned_model"])
            else:
                job["error"] = error("The audit was not passed.", "safety_gate_failed")["error"]
        return job

    def chat(self, body: Json) -> Json | None:
        if body["model"] not in self.models:
            return None
        with self.lock:
            number = self.asked[json.dumps([body["model"], body["messages"]])]
            self.asked[json.dumps([body["model"], body["messages"]])] += 1
        message = {"role": "assistant", "content": self.say(body, number)}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return {"id": "c", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}

    def create(self, body: Json, key: str) -> Json:
        with self.lock:
            if key not in self.by_key:
                job_id = f"ftjob-here-{len(self.jobs)}"
                self.by_key[key] = job_id
                self.jobs[job_id] = {"id": job_id, "object": "fine_tuning.job", "status": "queued", **body}
                self.jobs[job_id]["fine_tuned_model"] = None
            return dict(self.jobs[self.by_key[key]])


def _handler(stub: Stub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            path = unquote(url.path).removeprefix(stub.prefix)
            self.answer("GET", path, lambda: stub.get(path, parse_qs(url.query)))

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            path = unquote(urlsplit(self.path).path).removeprefix(stub.prefix)
            if path == "/files":
                return self.answer("POST", path, lambda: self.upload(data))
            body = json.loads(data)
            stub.bodies.append(body)
            if path.endswith("/chat/completions"):
                named = re.fullmatch("/deployments/([^/]+)/chat/completions", path)
                asked = body | {"model": stub.deployments.get(named[1] if named else body["model"], body["model"])}
                return self.answer("POST", path, lambda: stub.chat(asked))
            return self.answer("POST", path, lambda: stub.create(body, self.headers["idempotency-key"] or "none"))

        def upload(self, data: bytes) -> Json:
            boundary = self.headers["content-type"].split("boundary=")[1].encode()
            part = next(each for each in data.split(b"--" + boundary) if b'name="file"' in each)
            head, _, content = part.partition(b"\r\n\r\n")
            found = re.search(rb'filename="([^"]+)"', head)
            assert found
            key = f"file-here-{len(stub.files)}"
            stub.add_file(found[1].decode(), content.removesuffix(b"\r\n"), key=key)
            return stub.files[key]

        def answer(self, method: str, path: str, right: Callable[[], Json | bytes | None]) -> None:
            stub.requests.append((method, path))
            if parse_qs(urlsplit(self.path).query).get("api-version", [None])[0] != stub.api_version:
                return self.send(404, error("Resource not found", "404"))
            if self.headers[stub.header] != ("Bearer " * (stub.header == "authorization")) + stub.key:
                return self.send(401, error(f"Incorrect API key provided: {self.headers['authorization']}"))
            order = next((stub.faults[each] for each in stub.faults if re.fullmatch(each, f"{method} {path}")), None)
            fault = order() if order else None
            if isinstance(fault, tuple):
                return self.send(*fault)
            found = right()
            if found is None:
                return self.send(404, error(f"No such {path.split('/')[1]}: {path}", "not_found"))
            if fault == "lost":  # done, and the answer never arrives
                self.close_connection = True
                return None
            data = found if isinstance(found, bytes) else json.dumps(found).encode()
            sent = data[: len(data) // 2] if fault in ("cut", "short") else data
            kind = "octet-stream" if isinstance(found, bytes) else "json"
            return self.send_bytes(
                200, sent, {"content-type": f"application/{kind}"}, len(data if fault == "cut" else sent)
            )

        def send(self, status: int, body: Json, headers: dict[str, str] | None = None) -> None:
            data = json.dumps(body).encode()
            self.send_bytes(status, data, {"content-type": "application/json", **(headers or {})}, len(data))

        def send_bytes(self, status: int, data: bytes, headers: dict[str, str], length: int) -> None:
            self.send_response(status)
            for name, value in {**headers, "content-length": str(length)}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@contextmanager
def serve_stub(stub: Stub) -> Iterator[Stub]:
    """Serve while the block runs."""
    http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(stub))
    http.daemon_threads = True
    stub.url = f"http://127.0.0.1:{http.server_port}{stub.prefix}"
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield stub
    finally:
        with suppress(OSError):
            http.shutdown()
        http.server_close()
        thread.join()
