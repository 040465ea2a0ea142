"""What serving costs: beside transformers and PEFT alone, and the memory of many adapters on one base model.

    python -m benchmarks.serving [--hidden 512 --layers 8] [--adapters 100] [--rounds 5] [--device cuda]

A random model of the size asked for gets adapters of rank 4 that change what it says. One greedy reply is written in
turn by transformers' `generate` with PEFT in a process of its own, and through the service over HTTP as a stream to a
client in a process of its own; both write each token to a pipe, and both use one thread. Printed are the medians of
the time to the first token, of the tokens a second after it and of the CPU time that a token takes, and the medians of
their ratios, round by round: on a shared machine the CPU time says what the service costs, the clock also what others
do. Then every adapter is asked once, and the engine's memory is read before and after.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch

from tests.app.inference.conftest import Lab, serve_lab
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
device = sys.argv[3]
dtype = torch.float32 if device == "cpu" else torch.bfloat16
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
base = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=dtype).to(device)
model = PeftModel.from_pretrained(base, sys.argv[2]).eval()
print("ready", flush=True)
for line in sys.stdin:
    ask = json.loads(line)
    text = tokenizer.apply_chat_template(ask["messages"], add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").to(device)
    limits = {"max_new_tokens": ask["tokens"], "min_new_tokens": ask["tokens"], "do_sample": False}
    model.generate(**ids, **limits, streamer=Told(), pad_token_id=tokenizer.pad_token_id)
"""
_CLIENT = """
import json, sys
from openai import OpenAI

client = OpenAI(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=0)
print("ready", flush=True)
for line in sys.stdin:
    ask = json.loads(line)
    limits = {"max_tokens": ask["tokens"], "temperature": 0, "logprobs": True, "stream": True}
    print("asked", flush=True)
    for chunk in client.chat.completions.create(model=sys.argv[3], messages=ask["messages"], **limits):
        for token in (chunk.choices[0].logprobs.content if chunk.choices and chunk.choices[0].logprobs else None) or ():
            print("token", flush=True)
    print("end", flush=True)
"""


@dataclass(frozen=True, slots=True)
class Timing:
    """One reply: seconds to the first token, tokens a second after it, and milliseconds of CPU for each token."""

    first_s: float
    rate: float
    cpu_ms: float  # of the process that holds the model
    api_ms: float = 0.0  # of the API process


def main() -> None:
    """Measure both and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    asked = parser.parse_args()
    with TemporaryDirectory() as home:
        sizes = {"hidden_size": asked.hidden, "intermediate_size": 3 * asked.hidden, "max_position_embeddings": 2048}
        sizes |= {"num_hidden_layers": asked.layers, "num_attention_heads": 8, "head_dim": asked.hidden // 8}
        model = write_model(Path(home) / "model", eos_token_id=None, **sizes)
        weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        gpu, kind = (f", {torch.cuda.get_device_name()}", "bfloat16") if asked.device == "cuda" else ("", "float32")
        print(f"machine: {os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}{gpu}")
        print(f"model: {weights / 4e6:.1f} million parameters in {kind}")
        with serve_lab(Path(home) / "lab", model, serving_adapters_mb=4096.0, serving_device=asked.device) as lab:
            names = [lab.release(seed) for seed in range(asked.adapters)]
            compare(lab, names[0], asked.rounds)
            remember(lab, names)


def compare(lab: Lab, name: str, rounds: int) -> None:
    """Print both ways of answering, in turn."""
    with (
        start_script(_ALONE, str(lab.model), str(lab.adapter_folder(name)), lab.settings.serving_device) as own,
        start_script(_CLIENT, lab.url, lab.key(), name) as client,
    ):
        lab.client().chat.completions.create(
            model=name, messages=make_conversation(), max_tokens=1
        )  # starts the engine
        (engine,), api = (psutil.Process(each) for each in lab.app.state.serving.engines.pids()), psutil.Process()
        model = psutil.Process(own.pid)
        pairs = [(time_reply(own, model, None), time_reply(client, engine, api)) for _ in range(rounds + 1)][1:]
    print_ratio("first token, s", [(a.first_s, b.first_s) for a, b in pairs])
    print_ratio("tokens a second", [(a.rate, b.rate) for a, b in pairs])
    print_ratio("CPU of the model's process, ms a token", [(a.cpu_ms, b.cpu_ms) for a, b in pairs])
    print(f"CPU of the API beside it, ms a token: {statistics.median(served.api_ms for _, served in pairs):.2f}")


def print_ratio(what: str, pairs: Sequence[tuple[float, float]]) -> None:
    """Print the medians of what was found alone and served, and of the ratios of the rounds."""
    own, served = zip(*pairs, strict=True)
    ratios = [b / a for a, b in pairs]
    print(
        f"{what}: alone {statistics.median(own):.3f}, served {statistics.median(served):.3f}, "
        f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


def remember(lab: Lab, names: list[str]) -> None:
    """Print the engine's memory with one adapter and with all of them, and how long a first reply takes."""
    client, before, seconds = lab.client(), resident(lab), []
    for name in names[1:]:
        started = time.perf_counter()
        client.chat.completions.create(model=name, messages=make_conversation(), max_tokens=1, temperature=0)
        seconds.append(time.perf_counter() - started)
    after = resident(lab)
    size = next(each["bytes"] for each in stored_adapters(lab))
    print(f"memory: {before / 1e6:.0f} MB with 1 adapter, {after / 1e6:.0f} MB with {len(names)}")
    print(f"an adapter: {(after - before) / max(1, len(names) - 1) / 1e6:.2f} MB of memory, {size / 1e6:.2f} MB packed")
    if seconds:
        print(f"first reply of an adapter, verified, loaded and proved: median {statistics.median(seconds):.2f} s")


def stored_adapters(lab: Lab) -> list[Any]:
    """Return what is stored of the adapters."""
    return [{"bytes": path.stat().st_size} for path in lab.home.glob("*.tar.gz")]


def resident(lab: Lab) -> int:
    """Return the memory of the engines, in bytes: that which no other process shares."""
    processes = [psutil.Process(pid) for pid in lab.app.state.serving.engines.pids()]
    return sum(each.memory_full_info().uss for root in processes for each in [root, *root.children(recursive=True)])


@contextmanager
def start_script(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a script in a process of its own that is asked over a pipe, and end it after the block."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", script, *arguments], env=environment, text=True, **pipes) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def make_conversation() -> Any:
    """Return the conversation."""
    return [{"role": "user", "content": PROMPT}]


def time_reply(process: subprocess.Popen[str], model: psutil.Process, api: psutil.Process | None) -> Timing:
    """Ask, and time the tokens as they come; the first line is no token."""
    assert process.stdin
    assert process.stdout
    before, api_before, started = cpu_s(model), cpu_s(api), time.perf_counter()
    process.stdin.write(json.dumps({"messages": make_conversation(), "tokens": TOKENS}) + "\n")
    process.stdin.flush()
    process.stdout.readline()
    times = list[float]()
    while process.stdout.readline() == "token\n":
        times.append(time.perf_counter())
    used, api_used = cpu_s(model) - before, cpu_s(api) - api_before
    rate = (len(times) - 1) / (times[-1] - times[0])
    return Timing(times[0] - started, rate, used / len(times) * 1e3, api_used / len(times) * 1e3)


def cpu_s(process: psutil.Process | None) -> float:
    """Return the CPU seconds that a process and those it has started have taken."""
    each = [process, *process.children(recursive=True)] if process and process.pid != os.getpid() else [process]
    return sum(sum(one.cpu_times()[:2]) for one in each if one)


if __name__ == "__main__":
    main()
