"""vLLM's HTTP interface, as far as we use it, on a tiny model; it can be told to answer with the wrong weights."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import Tensor

from spard.models.base import Base, load_base
from worker.engine.batch import BASE, Batch
from worker.engine.texts import Text


@dataclass
class Vllm:
    """The server. `fault`: `ignores` answers with the base model, `mixes` with the adapter that was loaded first."""

    base: Base
    url: str = ""
    fault: str | None = None
    names: list[str] = field(default_factory=list)
    asks: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model: Any = self.base.model

    def load(self, name: str, path: str) -> None:
        if isinstance(self.model, PeftModel):
            self.model.load_adapter(path, adapter_name=name)
        else:
            self.model = PeftModel.from_pretrained(self.model, path, adapter_name=name)
        self.model.eval()
        self.names.append(name)

    def adapter(self, model: str) -> str:
        if model == "tiny" or self.fault == "ignores":
            return BASE
        return self.names[0] if self.fault == "mixes" else model

    def chunks(self, ask: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Greedy tokens, one after the other."""
        batch, tokenizer, written = Batch(self.model), self.base.tokenizer, 0
        text = Text(tokenizer, [])
        batch.join(ask["prompt"], self.adapter(ask["model"]), 1)
        while written < ask["max_tokens"]:
            logprobs = batch.logits_BV[0].log_softmax(dim=-1)
            token = int(logprobs.argmax())
            if token in ask["stop_token_ids"]:
                break
            written += 1
            told = _told(tokenizer, logprobs, token, ask) if ask.get("logprobs") else None
            yield _chunk([{"index": 0, "text": text.add(token), "logprobs": told, "finish_reason": None}])
            batch.step([token])
        end = "length" if written == ask["max_tokens"] else "stop"
        yield _chunk([{"index": 0, "text": text.end(), "logprobs": None, "finish_reason": end}])
        usage = {"prompt_tokens": len(ask["prompt"]), "completion_tokens": written, "total_tokens": 0}
        yield _chunk([]) | {"usage": usage}


def _told(tokenizer: Any, logprobs: Tensor, token: int, ask: dict[str, Any]) -> dict[str, Any]:
    def text(number: int) -> str:
        return f"token_id:{number}" if ask["return_tokens_as_token_ids"] else str(tokenizer.decode([number]))

    values, ids = logprobs.topk(ask["logprobs"])
    top = {text(i): x for i, x in zip(ids.tolist(), values.tolist(), strict=True)}
    return {"tokens": [text(token)], "token_logprobs": [float(logprobs[token])], "top_logprobs": [top]}


def _chunk(choices: list[Any]) -> dict[str, Any]:
    return {"id": "c", "object": "text_completion", "created": 0, "model": "m", "choices": choices, "usage": None}


@contextmanager
def vllm_stub(model: Path) -> Iterator[Vllm]:
    """Serve while the block runs."""
    state = Vllm(load_base(model, device="cpu"))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            match self.path:
                case "/v1/load_lora_adapter":
                    state.load(body["lora_name"], body["lora_path"])
                    self._answer(200, b"Success")
                case "/v1/unload_lora_adapter":
                    self._answer(404, b'{"message": "not found"}')
                case _ if body["model"] not in ("tiny", *state.names):
                    self._answer(404, b'{"message": "no such model"}')
                case _ if len(body["prompt"]) > 200:
                    self._answer(400, b'{"message": "This model\'s maximum context length is 200 tokens."}')
                case _:
                    state.asks.append(body)
                    lines = [f"data: {json.dumps(each)}\n\n" for each in state.chunks(body)]
                    self._answer(200, "".join([*lines, "data: [DONE]\n\n"]).encode(), "text/event-stream")

        def _answer(self, status: int, data: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{http.server_port}/v1"
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield state
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
