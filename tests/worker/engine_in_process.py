"""An engine in this process: what it is asked, what it says, and adapters to ask."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any, cast

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from peft import PeftModel

from app.inference.protocol import Ask, EngineMessage
from spard.config import Lora, Recipe
from spard.models.adapters import save_adapter
from spard.models.base import load_base
from spard.models.generate import generate
from spard.models.lora import trainable_model
from spard.release.manifest import sign, verify
from worker.engine.grammar import Forms
from worker.engine.serve import Engine

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
QUESTIONS = ["Hello there", "What is two and two?", "x", "A longer question, about nothing in particular at all."]
TOKENS = 24


def make(model: Path, folder: Path, seed: int, scale: float = 0.2) -> Path:
    base = load_base(model, device="cpu")
    tuned = trainable_model(base.model, Recipe(lora=Lora(rank=4), seed=seed))
    generator = torch.Generator().manual_seed(seed)
    for name, weights in tuned.named_parameters():
        if "lora_B" in name:
            weights.data = scale * torch.randn(weights.shape, generator=generator)
    save_adapter(tuned, base, "tiny", folder)
    sign(folder, KEY)
    return folder


def line(number: int, question: str, adapter: str | None, project: str = "p", **more: Any) -> dict[str, Any]:
    """What an engine is told to have a question answered."""
    ask: Ask = {
        "adapter": adapter,
        "messages": [{"role": "user", "content": question}],
        "prompt": None,
        "tools": [],
        "n": 1,
        "max_tokens": TOKENS,
        "temperature": 0.0,
        "top_p": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": None,
        "stop": [],
        "json_schema": None,
        "top_logprobs": None,
        "as_ids": False,
    }
    ask |= cast(Ask, more)
    return {"op": "generate", "id": number, "project": project, "ask": ask}


class Asked:
    """An engine in this process, and every line that it has said."""

    def __init__(self, model: Path, rows: int = 8, adapter_bytes: int = 1 << 30) -> None:
        self.said: list[EngineMessage] = []
        self.forms = Forms(str(model), None, rows)
        weakref.finalize(self, self.forms.close)
        base = load_base(model, device="cpu")
        self.engine = Engine(base, self.said.append, rows, adapter_bytes, forms=self.forms)
        self.asked = 0

    def load(self, folder: Path, manifest: str | None = None) -> EngineMessage:
        told = {"op": "load", "adapter": folder.name, "folder": str(folder)}
        self.engine.take(told | {"manifest_sha256": manifest or verify(folder).manifest_sha256})
        return self.said[-1]

    def ask(self, question: str, adapter: str | None = None, project: str = "p", **more: Any) -> int:
        self.asked += 1
        self.engine.take(line(self.asked, question, adapter, project, **more))
        return self.asked

    def run(self) -> None:
        while self.engine.is_busy:
            self.engine.step()

    def text(self, number: int, index: int = 0) -> str:
        pieces = [each for each in self.said if each["kind"] == "piece" and each["id"] == number]
        return "".join(each["text"] for each in pieces if each["index"] == index)

    def order(self) -> list[int]:
        return [each["id"] for each in self.said if each["kind"] == "started"]


def alone(model: Path, adapter: Path | None, question: str) -> str:
    base = load_base(model, device="cpu")
    tuned = base.model if adapter is None else PeftModel.from_pretrained(base.model, adapter).eval()
    return generate(tuned, base.tokenizer, [question], TOKENS)[0]
