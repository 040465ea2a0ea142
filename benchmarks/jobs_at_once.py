"""Measure what several small jobs on one base model would cost at once: `python -m benchmarks.jobs_at_once`.

A prototype, to decide whether workers should do it. It trains plain LoRA adapters (rank 16, attention layers, AdamW, no
defense) in float32, in three ways that alternate in rounds:

- one: one job;
- in turn: `--jobs` jobs, one after the other, in one process that has loaded the model once;
- at once: all jobs in the same passes. Each batch holds `--batch` rows of every job; the base model's products are
  computed for all of them together, each adapter's for its own rows, and each adapter has its own optimizer.

Then it generates greedy replies to `--prompts` prompts, and to `--jobs` times as many, as an audit of one job and of
all of them: an adapter's own products are small, so this is how far larger batches make a reply cheaper.

The table shows the median CPU seconds with their range, and the ratio to one job. The first line is the set-up that
jobs at once would share: a new process that imports PyTorch and this library and loads the model. Before the table
stands the largest difference between the weights of the adapters that were trained in turn and at once; rows are padded
to other lengths there, so it is not zero. Without `--model` and `--rows` both are random, as in `benchmarks.training`.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.nn.utils.rnn import pad_sequence

from benchmarks.training import LONGEST, LORA, SHAPES, write_model, write_rows
from spard.data.batches import read_examples
from spard.data.chat import encode_all
from spard.data.samples import NO_LOSS, EncodedSample
from spard.models.base import Base, load_base
from spard.models.generate import generate

RATE, TOKENS = 5e-5, 64  # learning rate; limit of a reply's tokens


class JointLinear(nn.Module):
    """A frozen linear layer with one LoRA adapter for each job; `rows` is the number of a job's rows in the batch."""

    def __init__(self, frozen: nn.Linear, jobs: Sequence[int]) -> None:
        super().__init__()
        self.frozen, self.rows, self.scale = frozen, 0, LORA["lora_alpha"] / LORA["r"]
        draws = [torch.Generator().manual_seed(job) for job in jobs]
        shape, width = (LORA["r"], frozen.in_features), frozen.in_features**-0.5
        self.down = nn.ParameterList([torch.randn(shape, generator=draw) * width for draw in draws])
        self.up = nn.ParameterList([torch.zeros(frozen.out_features, LORA["r"]) for _ in draws])

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the layer's output, each job's rows with its own adapter."""
        parts = [
            self.scale * linear(linear(part, down), up)
            for part, down, up in zip(torch.split(x_BTD, self.rows), self.down, self.up, strict=True)
        ]
        found: Tensor = self.frozen(x_BTD) + torch.cat(parts)
        return found


def main() -> None:
    """Run all ways in alternating rounds, and print the table."""
    asked = _arguments()
    torch.set_num_threads(asked.threads)
    with TemporaryDirectory(prefix="spard-jobs-at-once-") as folder:
        count = asked.jobs * asked.count
        path = asked.rows or write_rows(Path(folder) / "rows.jsonl", count, asked.seed)
        model = asked.model or write_model(Path(folder) / "model", path, asked.size, asked.seed)
        set_up = [_measure_start(model) for _ in range(asked.rounds)]
        base = load_base(str(model))
        rows = encode_all(base.tokenizer, read_examples(path)[:count], LONGEST)
    jobs = [rows[start :: asked.jobs] for start in range(asked.jobs)]
    prompts = [base.tokenizer.decode(row.ids[:32], skip_special_tokens=True) for row in rows]
    taken: dict[str, list[float]] = {name: [] for name in ("one", "in turn", "at once")}
    replies: dict[str, list[float]] = {"replies, one": [], "replies, at once": []}
    train(base, [jobs[0][: asked.batch]], [0], asked.batch)  # warms up
    for _ in range(asked.rounds):
        taken["one"].append(train(base, jobs[:1], [0], asked.batch)[0])
        alone = [train(base, [job], [number], asked.batch) for number, job in enumerate(jobs)]
        taken["in turn"].append(sum(seconds for seconds, _ in alone))
        seconds, together = train(base, jobs, range(asked.jobs), asked.batch)
        taken["at once"].append(seconds)
        for name, several in zip(replies, (1, asked.jobs), strict=True):
            replies[name].append(_measure_replies(base, prompts, asked.prompts * several))
    pairs = [(a, b) for (_, one), part in zip(alone, together, strict=True) for a, b in zip(one[0], part, strict=True)]
    apart = max(float((a - b).abs().max()) for a, b in pairs)
    print(
        f"{asked.jobs} jobs of {asked.count} rows, batches of {asked.batch}, largest difference of weights {apart:.1e};"
    )
    print(
        f"{asked.threads} thread(s), {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"{asked.rounds} round(s)"
    )
    print(f"{'':18}{'CPU s':>9}{'range':>16}{'x one':>8}")
    _print_line("set-up", set_up, None)
    for table in (taken, replies):
        first = next(iter(table.values()))
        for name, seconds_taken in table.items():
            _print_line(name, seconds_taken, first)


def train(
    base: Base, jobs: Sequence[Sequence[EncodedSample]], seeds: Sequence[int], batch: int
) -> tuple[float, list[list[Tensor]]]:
    """Train one epoch of all jobs in the same passes; return the CPU seconds, and each job's trained weights.

    `seeds` draw each job's first weights. Raises `ValueError` if jobs have different numbers of rows.
    """
    if len({len(rows) for rows in jobs}) != 1:
        raise ValueError("all jobs must have the same number of rows")
    layers = _insert_adapters(base.model, seeds)
    weights = [[each for layer in layers for each in (layer.down[i], layer.up[i])] for i in range(len(jobs))]
    optimizers = [torch.optim.AdamW(each, lr=RATE) for each in weights]
    batches = [_batches(rows, batch) for rows in jobs]
    begun = time.process_time()
    for parts in zip(*batches, strict=True):
        for layer in layers:
            layer.rows = len(parts[0])
        _backward(base.model, [row for part in parts for row in part], len(parts[0]))
        for each, optimizer in zip(weights, optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(each, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    seconds = time.process_time() - begun
    _remove_adapters(base.model)
    return seconds, [[each.detach() for each in part] for part in weights]


def _backward(model: Any, rows: Sequence[EncodedSample], size: int) -> None:
    """Add the gradients of the sum of the jobs' mean losses; each job has `size` rows."""
    ids = pad_sequence([torch.tensor(row.ids) for row in rows], batch_first=True)
    mask = pad_sequence([torch.ones(len(row.ids), dtype=torch.long) for row in rows], batch_first=True)
    labels = pad_sequence([torch.tensor(row.labels) for row in rows], batch_first=True, padding_value=NO_LOSS)[:, 1:]
    states = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, :-1]
    losses = []
    for part, known in zip(torch.split(states, size), torch.split(labels, size), strict=True):
        is_learned = known != NO_LOSS
        losses.append(cross_entropy(model.lm_head(part[is_learned]), known[is_learned]))
    torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]


def _batches(rows: Sequence[EncodedSample], size: int) -> list[list[EncodedSample]]:
    """Return whole batches of rows of similar length, in a drawn order."""
    longest_last = sorted(rows, key=lambda row: len(row.ids))
    found = [longest_last[start : start + size] for start in range(0, len(rows), size)]
    found = [each for each in found if len(each) == size]
    Random(0).shuffle(found)
    return found


def _insert_adapters(model: nn.Module, seeds: Sequence[int]) -> list[JointLinear]:
    model.requires_grad_(False)
    found = []
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in LORA["target_modules"] and isinstance(module, nn.Linear):
            holder = model.get_submodule(name.rpartition(".")[0])
            layer = JointLinear(module, seeds)
            setattr(holder, name.rpartition(".")[2], layer)
            found.append(layer)
    return found


def _remove_adapters(model: nn.Module) -> None:
    for name, module in list(model.named_modules()):
        if isinstance(module, JointLinear):
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], module.frozen)


def _measure_replies(base: Base, prompts: Sequence[str], count: int) -> float:
    """Return the CPU seconds of `count` greedy replies; prompts are repeated with other endings if there are fewer."""
    if not count:
        return 0.0
    asked = [f"{prompts[i % len(prompts)]}{'?' * (i // len(prompts))}" for i in range(count)]
    begun = time.process_time()
    generate(base.model, base.tokenizer, asked, TOKENS)
    return time.process_time() - begun


def _measure_start(model: Path) -> float:
    """Return the CPU seconds of a new process that imports the library and loads the model."""
    code = "import sys; from spard.models.base import load_base; import spard.training.train; load_base(sys.argv[1])"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code, str(model)], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _print_line(name: str, seconds: Sequence[float], one: Sequence[float] | None) -> None:
    spread = f"{min(seconds):.2f}-{max(seconds):.2f}"
    ratio = statistics.median(a / b for a, b in zip(seconds, one, strict=True) if b) if one and any(one) else None
    print(f"{name:18}{statistics.median(seconds):9.2f}{spread:>16}" + (f"{ratio:8.2f}" if ratio is not None else ""))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jobs_at_once", description=__doc__)
    parser.add_argument("--size", choices=tuple(SHAPES), default="5m", help="of the random model")
    parser.add_argument("--model", type=Path, help="a model's folder instead; of the Llama kind")
    parser.add_argument("--rows", type=Path, help="a training file of chats")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--count", type=int, default=32, help="rows of each job")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=40, help="replies of one job's audit; 0 leaves them out")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
