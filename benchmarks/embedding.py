"""Compare the speed of our embedding with sentence-transformers on the same model and texts.

Run `python -m benchmarks.embedding [--texts FILE --model FOLDER]`. The arms:

- ours: `spard.selection.embeddings.embed`, which jobs use for the pool and the customer's rows;
- one by one: the same function with a single text per call;
- sentence-transformers: the library's `encode` with mean pooling, if it is installed.

The arms alternate in rounds. The table shows the median CPU time with its range, the ratio to ours, the share of
padding tokens, and the largest difference of a vector's element from ours. The last line is a lower bound (`floor`) for
our time, the matrix products of the texts' tokens with the model's weights at the speed measured for one product, and
its share of our time. Without `--model` the weights are random; without `--texts` the texts are random, with log-normal
lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.lower_bound import matmul_seconds
from benchmarks.training import SHAPES, write_model, write_rows
from spard.data.batches import FORWARD, cut
from spard.models.base import Base, load_base
from spard.models.budget import pass_tokens
from spard.selection.embeddings import embed

LIMIT = 512  # tokens of a text


def main() -> None:
    """Run all arms in alternating rounds and print the table."""
    asked = _arguments()
    torch.set_num_threads(asked.threads)
    with TemporaryDirectory(prefix="spard-embedding-") as folder:
        rows = asked.texts or write_rows(Path(folder) / "rows.jsonl", asked.count, asked.seed)
        model = asked.model or write_model(Path(folder) / "model", rows, asked.size, asked.seed)
        texts = [row_text(json.loads(line)) for line in rows.read_text().splitlines()][: asked.count]
        base = load_base(str(model))
        arms = _arms(base, _without_template(model, Path(folder) / "plain"))
        vectors = {name: embedded(texts[:32]) for name, embedded in arms.items()}  # the first pass warms up
        found: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(asked.rounds):
            for name, embedded in arms.items():
                begun = time.process_time()
                vectors[name] = embedded(texts)
                found[name].append(time.process_time() - begun)
    print(f"{len(texts)} texts, {asked.threads} thread(s), {platform.machine()}, {os.cpu_count()} cores, ", end="")
    print(f"load {os.getloadavg()[0]:.1f}; {asked.rounds} rounds")
    lengths = [len(row) for row in base.tokenizer(texts, truncation=True, max_length=LIMIT)["input_ids"]]
    print(f"{'':24}{'CPU s':>9}{'range':>14}{'x ours':>9}{'padding':>9}{'away':>10}")
    for name, seconds in found.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, found["ours"], strict=True))
        away = float((vectors[name] - vectors["ours"]).abs().max())
        spread = f"{min(seconds):.2f}-{max(seconds):.2f}"
        padding = _padding(_parts(name, texts, lengths, pass_tokens(base.model)), lengths)
        print(f"{name:24}{statistics.median(seconds):9.2f}{spread:>14}{ratio:9.2f}{padding:9.1%}{away:10.1e}")
    floor, rate = matmul_seconds(base, sum(lengths))
    print(f"floor {floor:.2f} s at {rate:.0f} billion operations a second: ", end="")
    print(f"{floor / statistics.median(found['ours']):.0%} of our time")


def _parts(name: str, texts: list[str], lengths: list[int], most: int) -> list[list[int]]:
    """Return the indices of the texts in each batch of an arm; `most` is our largest batch in tokens."""
    if name == "ours":
        return cut(lengths, most, FORWARD)
    if name == "one by one":
        return [[i] for i in range(len(texts))]
    longest_first = sorted(range(len(texts)), key=lambda i: -len(texts[i]))  # by characters, 32 at a time
    return [longest_first[i : i + 32] for i in range(0, len(texts), 32)]


def _padding(parts: list[list[int]], lengths: list[int]) -> float:
    """Return the share of padding among all tokens of the batches."""
    return 1 - sum(lengths) / sum(len(part) * max(lengths[i] for i in part) for part in parts)


def _arms(base: Base, model: Path) -> dict[str, Callable[[list[str]], Tensor]]:
    arms: dict[str, Callable[[list[str]], Tensor]] = {
        "ours": lambda texts: embed(base, texts),
        "one by one": lambda texts: torch.cat([embed(base, [text]) for text in texts]),
    }
    if find_spec("sentence_transformers"):
        theirs = import_module("sentence_transformers")
        parts = import_module("sentence_transformers.sentence_transformer.modules")
        transformer = parts.Transformer(str(model), max_seq_length=LIMIT)
        pooling = parts.Pooling(base.hidden_size, "mean")
        encoder = theirs.SentenceTransformer(modules=[transformer, pooling], device="cpu")
        arms["sentence-transformers"] = lambda texts: encoder.encode(
            texts, convert_to_tensor=True, show_progress_bar=False
        )
    return arms


def _without_template(model: Path, folder: Path) -> Path:
    """Copy a model without its chat template, which sentence-transformers otherwise applies to each text."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("chat_template*"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return folder


def row_text(row: dict[str, object]) -> str:
    """Return a row's first message, or else its `prompt` or `question`."""
    messages = row.get("messages")
    return str(messages[0]["content"] if isinstance(messages, list) else row.get("prompt") or row.get("question"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.embedding", description=__doc__)
    parser.add_argument("--size", choices=tuple(SHAPES), default="5m", help="of the random model")
    parser.add_argument("--model", type=Path, help="a model's folder instead")
    parser.add_argument("--texts", type=Path, help="JSONL with `prompt`, `question` or `messages`")
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
