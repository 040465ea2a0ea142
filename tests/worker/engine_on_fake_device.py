"""python -m tests.worker.engine_on_fake_device MODEL ADAPTER...: what an engine says there, in JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from spard.models.base import Base, read_base
from tests.fake_device import NAME, fake_device
from tests.worker import engine_in_process as of_engines

parts: Any = of_engines


def main() -> None:
    model, *adapters = map(Path, sys.argv[1:])

    def load(model: Path, device: str) -> Base:
        base = read_base(str(model), device=f"{NAME}:0", dtype=torch.float32)
        base.model.to(base.device)
        return base

    with fake_device():
        parts.load_base = load
        asked = parts.Asked(model)
        kinds = [asked.load(folder)["kind"] for folder in adapters]
        numbers = list[int]()
        for question in parts.QUESTIONS:
            for adapter in (None, *adapters):
                numbers.append(asked.ask(question, adapter.name if adapter else None))
                asked.engine.step()
        several = asked.ask("x", adapters[0].name, n=3, temperature=1.0, top_p=0.9, seed=4, presence_penalty=0.5)
        held = asked.ask(
            "x", json_schema={"type": "array", "items": {"type": "integer"}, "maxItems": 2}, top_logprobs=3
        )
        asked.run()
        ended = [each["id"] for each in asked.said if each["kind"] == "done"]
    texts = [asked.text(number).strip() for number in numbers]
    found = {"kinds": kinds, "texts": texts, "has_all": sorted(ended) == [*numbers, several, held]}
    sys.stdout.write(json.dumps(found | {"device": str(asked.engine._base.model.device)}))


if __name__ == "__main__":
    main()
