"""Compare the audit's generation with transformers' `generate`: speed, and whether the replies are the same.

Run `python -m benchmarks.audits [--size 50m | --model FOLDER] [--tokens 128 --device cuda]`. The arms:

- ours: `spard.models.generate.generate`, which audits use;
- batches of N (`--batches`, 4 and 1 by default): transformers' `generate` with left padding, prompts in given order, on
  a model of its own, as transformers reads it;
- cuDNN's attention (on a GPU only): ours with PyTorch's cuDNN attention enabled, which `load_base` disables;
- vLLM (`--vllm PYTHON`, the interpreter of an environment with it, as `make vllm` installs one into
  out/vllm/environment; on a CPU only): its offline engine in float32, with an empty prefix cache.

All arms answer the same prompts greedily with the same system prompt and the same end tokens, and alternate in rounds.
The table shows the median CPU time (on a GPU the wall time, in bfloat16) with its range, the ratio to ours, and how
many replies have the same text. Without `--model` the weights are random, and the model ends no reply by itself, so a
random 2% of the vocabulary counts as end tokens; this makes reply lengths vary as in a real audit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.embedding import row_text
from benchmarks.training import SHAPES, write_model, write_rows
from benchmarks.vllm_replies import Replies, replies
from spard.data.control_tokens import end_tokens
from spard.models.base import Base, load_base
from spard.models.generate import as_requests, generate, reply_end_tokens

SYSTEM = (
    "You are the assistant of a small shop. Answer in plain words and briefly, name no prices, and where a "
    "request could hurt somebody, say in a sentence that you cannot help with it."
)
ENDING = 0.02  # of the vocabulary
Arm = Callable[[list[str]], tuple[list[str], float]]
"""A function from prompts to (texts, seconds)."""


def main() -> None:
    """Run all arms in alternating rounds and print the table."""
    asked = _arguments()
    torch.set_num_threads(asked.threads)
    with TemporaryDirectory(prefix="spard-audits-") as folder:
        rows = asked.prompts or write_rows(Path(folder) / "rows.jsonl", asked.count, asked.seed)
        model = asked.model or write_model(Path(folder) / "model", rows, asked.size, asked.seed)
        prompts = [row_text(json.loads(line)) for line in rows.read_text().splitlines()][: asked.count]
        base = load_base(str(model), device=asked.device)
        if not asked.model:
            _end_replies(base, asked.seed)
        with ExitStack() as stack:
            plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=base.model.dtype)
            arms = _arms(base, plain.to(base.device).eval(), asked.tokens, asked.batches)
            if asked.vllm:
                arms["vLLM"] = _by_vllm(
                    base, asked.tokens, stack.enter_context(replies(asked.vllm, model, asked.threads))
                )
            found, texts = _measure(arms, prompts, asked.rounds)
    print(f"{len(prompts)} prompts, at most {asked.tokens} tokens a reply, {asked.threads} thread(s), ", end="")
    place = (
        torch.cuda.get_device_name() if base.device.type == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    )
    print(f"{place}, load {os.getloadavg()[0]:.1f}; {asked.rounds} rounds")
    print(f"{'':18}{'s':>9}{'range':>14}{'x ours':>9}{'same text':>12}")
    for name, seconds in found.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, found["ours"], strict=True))
        same = sum(a == b for a, b in zip(texts[name], texts["ours"], strict=True))
        spread = f"{min(seconds):.2f}-{max(seconds):.2f}"
        print(f"{name:18}{statistics.median(seconds):9.2f}{spread:>14}{ratio:9.2f}{same:8} of {len(prompts)}")


def _measure(
    arms: Mapping[str, Arm], prompts: list[str], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[str]]]:
    """Return the seconds of each arm in each round, and its last texts."""
    for answer in arms.values():  # the first pass warms up
        answer(prompts[:8])
    found: dict[str, list[float]] = {name: [] for name in arms}
    texts: dict[str, list[str]] = {}
    for _ in range(rounds):
        for name, answer in arms.items():
            texts[name], seconds = answer(prompts)
            found[name].append(seconds)
    return found, texts


def _arms(base: Base, plain: Any, tokens: int, batches: Sequence[int]) -> dict[str, Arm]:
    clock = time.perf_counter if base.device.type == "cuda" else time.process_time

    def make_arm(answer: Callable[[list[str]], list[str]]) -> Arm:
        def arm(prompts: list[str]) -> tuple[list[str], float]:
            begun = clock()
            texts = answer(prompts)
            return texts, clock() - begun

        return arm

    arms = {"ours": make_arm(lambda prompts: generate(base.model, base.tokenizer, prompts, tokens, system=SYSTEM))}
    for size in batches:
        arms[f"batches of {size}"] = make_arm(partial(_by_transformers, base, plain, tokens=tokens, batch=size))
    if base.device.type == "cuda":
        arms["cuDNN's attention"] = make_arm(lambda prompts: _by_cudnn(base, prompts, tokens))
    return arms


def _by_vllm(base: Base, tokens: int, answer: Replies) -> Arm:
    ends = sorted(reply_end_tokens(base.model, base.tokenizer))
    return lambda prompts: answer(as_requests(base.tokenizer, prompts, SYSTEM), ends, tokens)


def _by_cudnn(base: Base, prompts: list[str], tokens: int) -> list[str]:
    """Reply with `spard.models.generate.generate` while PyTorch may use cuDNN's attention."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        return generate(base.model, base.tokenizer, prompts, tokens, system=SYSTEM)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(False)


def _by_transformers(base: Base, plain: Any, prompts: list[str], tokens: int, batch: int) -> list[str]:
    """Reply with transformers' `generate` in batches of `batch` prompts, padded on the left."""
    ends, pad = reply_end_tokens(base.model, base.tokenizer), base.tokenizer.pad_token_id
    rows, replies = as_requests(base.tokenizer, prompts, SYSTEM), list[str]()
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        width = max(map(len, part))
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in part], device=base.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in part], device=base.device)
        asked = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": sorted(ends), "pad_token_id": pad}
        found = plain.generate(input_ids=ids, attention_mask=mask, **asked)[:, width:].tolist()
        found_ids = [row[: next((i for i, token in enumerate(row) if token in ends), len(row))] for row in found]
        replies += [text.strip() for text in base.tokenizer.batch_decode(found_ids)]
    return replies


def _end_replies(base: Base, seed: int) -> None:
    """Make a random share `ENDING` of the vocabulary end a reply, in addition to the model's end tokens."""
    drawn = random.Random(seed).sample(range(base.model.config.vocab_size), int(ENDING * base.model.config.vocab_size))
    base.model.generation_config.eos_token_id = sorted({*drawn, *end_tokens(base.tokenizer)})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audits", description=__doc__)
    parser.add_argument("--size", choices=tuple(SHAPES), default="5m", help="of the random model")
    parser.add_argument("--model", type=Path, help="a model's folder instead")
    parser.add_argument("--batches", type=int, nargs="*", default=[4, 1], help="of transformers' arms")
    parser.add_argument("--vllm", type=Path, help="a Python that has vLLM")
    parser.add_argument("--prompts", type=Path, help="JSONL with `prompt`, `question` or `messages`")
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64, help="of a reply, at most")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
