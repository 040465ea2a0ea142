"""Replies from vLLM where it is installed: prompts, tokens and stops as in `spard.models.generate`, faster on a GPU.

vLLM is no dependency and is loaded by name when a speaker is opened. Its kernels round differently, so that greedy
replies may differ from those of transformers in places; figures of the two engines are not to be mixed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spard.data.control_tokens import end_tokens
from spard.data.rows import Prompt
from spard.errors import InvalidData
from spard.evaluation.ask import Batch, Speaker, as_asked

BATCH = 256  # replies after which the judge may begin
MAX_RANK = 256


def is_installed() -> bool:
    """Return whether vLLM can be imported; nothing is loaded to find out."""
    return importlib.util.find_spec("vllm") is not None


def vllm_speaker(model: str, tokenizer: Any, adapter: Path | None = None) -> Speaker:
    """Return a generator that runs a model, with a LoRA adapter or without, in vLLM's engine in this process."""
    vllm = importlib.import_module("vllm")
    engine = vllm.LLM(model=model, enable_lora=adapter is not None, max_lora_rank=MAX_RANK, seed=0)
    lora = importlib.import_module("vllm.lora.request").LoRARequest("adapter", 1, str(adapter)) if adapter else None
    stops = sorted(end_tokens(tokenizer))

    def write(prompts: Sequence[Prompt], max_new_tokens: int) -> Iterator[Batch]:
        if any(each.temperature for each in prompts):
            raise InvalidData("sampled answers need the transformers engine")
        params = vllm.SamplingParams(temperature=0, max_tokens=max_new_tokens, stop_token_ids=stops)
        rows = as_asked(tokenizer, prompts)
        for start in range(0, len(rows), BATCH):
            batch = [{"prompt_token_ids": row} for row in rows[start : start + BATCH]]
            found = [each.outputs[0] for each in engine.generate(batch, params, lora_request=lora, use_tqdm=False)]
            places = list(range(start, start + len(batch)))
            yield places, [each.text.strip() for each in found], [each.finish_reason == "length" for each in found]

    return Speaker(write, _no_likelihood)


def _no_likelihood(prompts: Sequence[Prompt]) -> list[str]:
    raise InvalidData("scorers by likelihood need the transformers engine")
