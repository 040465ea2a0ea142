"""What serving costs: beside transformers and PEFT alone, and the memory of many adapters on one base model.

    python -m benchmarks.serving [--hidden 512 --layers 8] [--adapters 100] [--rounds 5]

A random model of the size asked for gets adapters of rank 8 that change what it says. One greedy reply is written in
turn by transformers' `generate` with PEFT in a process of its own, which writes each token to a pipe, and through the
service over HTTP as a stream; both with one thread. Printed are the medians of the time to the first token and of the
tokens a second after it, and the median of their ratios, round by round. Then every adapter is asked once, and the
engine's memory is read before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from openai import OpenAI

from tests.app.inference.conftest import Lab, lab_of
from tests.spard.parts import write_model

PROMPT, TOKENS = "What is two and two, and why? " * 8, 128
_ALONE = """
import json, sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

class Told(BaseStreamer):
    def put(self, value):
        print("token", flush=True)
    def end(self):
        print("end", flush=True)

torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(sys.argv[1]), sys.argv[2]).eval()
print("ready", flush=True)
for line in sys.stdin:
    ask = json.loads(line)
    text = tokenizer.apply_chat_template(ask["messages"], add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    limits = {"max_new_tokens": ask["tokens"], "min_new_tokens": ask["tokens"], "do_sample": False}
    model.generate(**ids, **limits, streamer=Told(), pad_token_id=tokenizer.pad_token_id)
"""
Timing = tuple[float, float]  # seconds to the first token, tokens a second after it


def main() -> None:
    """Measure both and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    with TemporaryDirectory() as home:
        sizes = {"hidden_size": asked.hidden, "intermediate_size": 3 * asked.hidden, "max_position_embeddings": 2048}
        sizes |= {"num_hidden_layers": asked.layers, "num_attention_heads": 8, "head_dim": asked.hidden // 8}
        model = write_model(Path(home) / "model", eos_token_id=None, **sizes)
        weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        print(f"machine: {os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}")
        print(f"model: {weights / 4e6:.1f} million parameters in float32")
        with lab_of(Path(home) / "lab", model, serving_adapters_mb=4096.0) as lab:
            names = [lab.release(seed) for seed in range(asked.adapters)]
            compare(lab, names[0], asked.rounds)
            remember(lab, names)


def compare(lab: Lab, name: str, rounds: int) -> None:
    """Print both ways of answering, in turn."""
    folder = next(each for each in lab.home.iterdir() if each.is_dir() and name.rpartition(":")[2] in each.name)
    client = lab.client()
    with alone(lab.model, folder) as process:
        pairs = [(timed(tokens_alone(process)), timed(tokens_served(client, name))) for _ in range(rounds + 1)][1:]
    for what, i, unit in (("first token", 0, "s"), ("tokens a second", 1, "")):
        own, served = ([pair[j][i] for pair in pairs] for j in (0, 1))
        ratios = [b / a for a, b in zip(own, served, strict=True)]
        print(
            f"{what}: alone {statistics.median(own):.3f}{unit}, served {statistics.median(served):.3f}{unit}, "
            f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def remember(lab: Lab, names: list[str]) -> None:
    """Print the engine's memory with one adapter and with all of them, and how long a first reply takes."""
    client, before, seconds = lab.client(), resident(lab), []
    for name in names[1:]:
        started = time.perf_counter()
        client.chat.completions.create(model=name, messages=asked(), max_tokens=1, temperature=0)
        seconds.append(time.perf_counter() - started)
    after = resident(lab)
    size = next(each["bytes"] for each in adapters_of(lab))
    print(f"memory: {before / 1e6:.0f} MB with 1 adapter, {after / 1e6:.0f} MB with {len(names)}")
    print(f"an adapter: {(after - before) / max(1, len(names) - 1) / 1e6:.2f} MB of memory, {size / 1e6:.2f} MB packed")
    if seconds:
        print(f"first reply of an adapter, verified, loaded and proved: median {statistics.median(seconds):.2f} s")


def adapters_of(lab: Lab) -> list[Any]:
    """Return what is stored of the adapters."""
    return [{"bytes": path.stat().st_size} for path in lab.home.glob("*.tar.gz")]


def resident(lab: Lab) -> int:
    """Return the memory of the engines, in bytes: that which no other process shares."""
    processes = [psutil.Process(pid) for pid in lab.app.state.serving.engines.pids()]
    return sum(each.memory_full_info().uss for root in processes for each in [root, *root.children(recursive=True)])


class alone:  # noqa: N801 - reads as the function it is
    """transformers and PEFT in a process of their own, within a block."""

    def __init__(self, model: Path, adapter: Path) -> None:
        command = [sys.executable, "-c", _ALONE, str(model), str(adapter)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, env=environment, text=True, **pipes)

    def __enter__(self) -> subprocess.Popen[str]:
        assert self._process.stdout
        assert self._process.stdout.readline() == "ready\n"
        return self._process

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()


def asked() -> Any:
    """Return the conversation."""
    return [{"role": "user", "content": PROMPT}]


def tokens_alone(process: subprocess.Popen[str]) -> Iterator[None]:
    """Ask, and yield at each token; the first that a streamer gets is the prompt."""
    assert process.stdin
    assert process.stdout
    process.stdin.write(json.dumps({"messages": asked(), "tokens": TOKENS}) + "\n")
    process.stdin.flush()
    process.stdout.readline()
    while process.stdout.readline() == "token\n":
        yield


def tokens_served(client: OpenAI, name: str) -> Iterator[None]:
    """Ask, and yield at each token."""
    ask: Any = {"messages": asked(), "max_tokens": TOKENS, "temperature": 0, "logprobs": True}
    for chunk in client.chat.completions.create(model=name, stream=True, **ask):
        logprobs = chunk.choices[0].logprobs if chunk.choices else None
        for _ in (logprobs.content if logprobs else None) or ():
            yield


def timed(tokens: Iterator[None]) -> Timing:
    """Return the time to the first token and the rate of the others."""
    started = time.perf_counter()
    times = [time.perf_counter() for _ in tokens]
    return times[0] - started, (len(times) - 1) / (times[-1] - times[0])


if __name__ == "__main__":
    main()
