"""Measure what it saves to compute the tokens that rows begin with once: `python -m benchmarks.shared_tokens`.

Forward and backward passes of LoRA training (rank 16, attention layers, float32) over random rows take turns: each row
alone, and the shared beginning once (`spard.models.forward`). A line has the tokens that are saved and the median ratio
of the wall times, alone to shared, with its quartiles: below 1, sharing costs more than it saves. `LEAST_SAVED` follows
from these lines. `--model FOLDER` measures a real model in place of random ones.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.training import SHAPES, VOCABULARY
from spard.models import forward
from spard.models.forward import final_states

SMALL = {"0.4m": (96, 3, 256, 4, 4)}  # hidden, layers, MLP, heads, key-value heads
CASES = ((4, 77, 12), (2, 80, 64), (4, 77, 24), (8, 77, 24), (4, 200, 100))  # rows, tokens of each, shared tokens
ALONE, SHARED = 2**62, 1  # for `LEAST_SAVED`


def main() -> None:
    """Print a line for each model and case."""
    asked = _arguments()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(asked.seed)
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {asked.threads} thread(s)")
    print(f"{'model':16}{'rows':>6}{'tokens':>8}{'shared':>8}{'saved':>7}{'alone / shared':>16}{'quartiles':>14}")
    for name, model in _models(asked.model).items():
        for rows, tokens, shared in CASES:
            ids_BT = torch.randint(5, VOCABULARY, (rows, tokens))
            ids_BT[:, :shared] = ids_BT[0, :shared].clone()
            ids_BT[:, shared] = torch.arange(5, 5 + rows)
            low, middle, high = statistics.quantiles(_ratios(model, ids_BT, asked.rounds), n=4)
            saved = shared * (rows - 1)
            print(
                f"{name:16}{rows:6}{tokens:8}{shared:8}{saved:7}{middle:16.2f}{f'{low:.2f}-{high:.2f}':>14}", flush=True
            )


def _ratios(model: Any, ids_BT: Tensor, rounds: int) -> list[float]:
    """Return the ratio of each round's wall times; the first round is not counted, and the order alternates."""
    found = []
    for number in range(rounds + 1):
        order = (ALONE, SHARED) if number % 2 else (SHARED, ALONE)
        took = {least: _seconds(model, ids_BT, least) for least in order}
        found.append(took[ALONE] / took[SHARED])
    return found[1:]


def _seconds(model: Any, ids_BT: Tensor, least: int) -> float:
    model.zero_grad()
    with patch.object(forward, "LEAST_SAVED", least):
        begun = time.perf_counter()
        final_states(model, ids_BT)[:, -20:].square().mean().backward()  # type: ignore[no-untyped-call]
        return time.perf_counter() - begun


def _models(folder: Path | None) -> dict[str, Any]:
    """Return the models by name, with new adapters."""
    lora = LoraConfig(r=16, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    if folder:
        return {folder.name: get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora)}
    shapes = SMALL | {name: SHAPES[name] for name in ("5m", "50m")}
    return {name: get_peft_model(LlamaForCausalLM(_config(*shape)), lora) for name, shape in shapes.items()}


def _config(hidden: int, layers: int, inner: int, heads: int, key_value_heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared_tokens", description=__doc__)
    parser.add_argument("--model", type=Path, help="a model's folder instead of random models")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
