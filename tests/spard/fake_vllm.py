"""The small part of vLLM's offline interface that an audit uses, over a Llama in NumPy, with faults at will.

Names, arguments, limits and what is given back are those of vLLM 0.10 to 0.24 as their sources have them; an argument
that is not listed here is refused. `VLLM_FAKE_FAULT` names the fault. The model is loaded with the first prompt, so
that a fault before it costs no time.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_MAX_LOGPROBS = 20
_FAULT = os.environ.get("VLLM_FAKE_FAULT", "")


@dataclass(frozen=True)
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class SamplingParams:
    temperature: float = 1.0
    max_tokens: int = 16
    stop_token_ids: list[int] = field(default_factory=list)
    logprobs: int | None = None
    detokenize: bool = True


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class LLM:
    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        dtype: str = "auto",
        load_format: str = "auto",
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        max_model_len: int | None = None,
        gpu_memory_utilization: float = 0.9,
        seed: int = 0,
        enforce_eager: bool = False,
        enable_prefix_caching: bool | None = None,
        disable_custom_all_reduce: bool = False,
        enable_lora: bool = False,
        max_loras: int = 1,
        max_lora_rank: int = 16,
    ) -> None:
        if os.environ.get("VLLM_FAKE_CALLS"):
            with open(os.environ["VLLM_FAKE_CALLS"], "a") as calls:
                calls.write(json.dumps({name: each for name, each in locals().items() if name != "self"}, default=str))
                calls.write("\n")
        if _FAULT == "hangs_at_load":
            _hang()
        if _FAULT == "does_not_load":
            raise ValueError("No available memory for the cache blocks")
        config = json.loads((Path(model) / "config.json").read_text())
        assert max_lora_rank in _RANKS
        assert load_format == "safetensors"
        assert not trust_remote_code
        assert dtype == "float32"
        assert config["num_attention_heads"] % tensor_parallel_size == 0
        positions = config["max_position_embeddings"]
        if max_model_len is not None and max_model_len > positions:
            raise ValueError("max_model_len is larger than the maximum that the model's configuration allows")
        self._limit, self._end = max_model_len or positions, config["eos_token_id"]
        self._source = model
        self._rank = max_lora_rank if enable_lora else 0
        self._model: Any = None
        self._is_adapted = False
        self._has_written = False

    def generate(
        self,
        prompts: list[dict[str, list[int]]],
        sampling_params: SamplingParams,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[Any]:
        assert sampling_params.temperature == 0.0
        assert (sampling_params.logprobs or 0) <= _MAX_LOGPROBS
        writes = sampling_params.logprobs is None
        if _FAULT == "answers_others":
            return [SimpleNamespace(outputs=[], prompt_token_ids=[1]) for _ in prompts]
        if _FAULT == "leaves_out":
            return []
        if writes and _FAULT == "dies":
            _leave_process()
            os.kill(os.getpid(), signal.SIGSEGV)
        if writes and _FAULT == "hangs":
            _leave_process()
            _hang()
        self._has_written |= writes
        return [self._answer(each["prompt_token_ids"], sampling_params, lora_request) for each in prompts]

    def _answer(self, row: list[int], params: SamplingParams, lora: LoRARequest | None) -> Any:
        if len(row) + 1 > self._limit:
            raise ValueError(f"The prompt (length {len(row)}) is longer than the maximum model length")
        model, ids, logprobs, reason = self._logprob_model(lora), list(row), list[dict[int, Logprob]](), "length"
        while len(ids) - len(row) < params.max_tokens and len(ids) < self._limit:
            log_p_V = model(ids)
            ids.append(int(log_p_V.argmax()))
            if params.logprobs:
                pairs = enumerate(_plain_llama().top(log_p_V, params.logprobs), 1)
                logprobs.append({token: Logprob(value, rank) for rank, (token, value) in pairs})
            if ids[-1] in (self._end, *params.stop_token_ids):
                reason = "stop"
                break
        said = ids[len(row) :]
        if _FAULT == "cuts_short" and params.logprobs is None:
            said = said[: max(1, len(said) // 2)]
        one = SimpleNamespace(text="", token_ids=said, logprobs=logprobs or None, finish_reason=reason)
        return SimpleNamespace(outputs=[one], prompt_token_ids=row, lora_request=lora)

    def _logprob_model(self, lora: LoRARequest | None) -> Callable[[list[int]], Any]:
        """Return what gives the log-probabilities of the next token, with an adapter or without."""
        if self._model is None:
            self._model = _plain_llama().PlainLlama(Path(self._source))
            if _FAULT == "other_base":
                self._model.shift_output()
        forgets = _FAULT == "forgets_adapter" and self._has_written
        is_adapted = lora is not None and not forgets and _FAULT != "ignores_adapter"
        if lora is not None and is_adapted and not self._is_adapted:
            self._load(lora)
        self._model.adapter_scale = 1.0 if is_adapted else 0.0
        answer: Callable[[list[int]], Any] = self._model.next_log_p
        return answer

    def _load(self, lora: LoRARequest) -> None:
        """Put an adapter's layers into the model."""
        config = json.loads((Path(lora.lora_path) / "adapter_config.json").read_text())
        if config["r"] > self._rank:
            raise ValueError(f"LoRA rank {config['r']} is greater than max_lora_rank {self._rank}.")
        self._model.load_adapter(Path(lora.lora_path), config, sign=-1.0 if _FAULT == "other_adapter" else 1.0)
        self._is_adapted = True


def _plain_llama() -> Any:
    """Return `tests/spard/plain_llama.py`, which is installed beside this file; faults before it cost no time."""
    return importlib.import_module("vllm.llama")


def _leave_process() -> None:
    subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(3600)", "left by the fake vLLM"])


def _hang() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)
