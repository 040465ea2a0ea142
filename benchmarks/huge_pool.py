"""Measure selection from a pool in files: `python -m benchmarks.huge_pool [--rows 1000000 --dimension 384]`.

Random embeddings around clusters, a few of them near the task, are written as shards like those in a worker's cache.
The output shows the CPU seconds and bytes read for relevance and selection, and the growth of memory that is not mapped
from files (RssAnon, sampled every 5 ms). Then the selected rows and their order are compared with a float64 greedy
selection over the whole pool in memory. `--no-oracle` skips this comparison, which needs twice the memory of the pool
in float32.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from spard.pipeline.embed import SHARD
from spard.selection import dpp
from spard.selection.shards import Shards, Vectors

CLUSTERS = 2000
NEAR = 40  # clusters that the task rows are drawn from


class CountingShards(Shards):
    """Shards that count the bytes of the rows read from them."""

    read = 0

    def __getitem__(self, rows: slice | Tensor | Sequence[int]) -> Tensor:
        """Return rows as `Shards` does, and add their bytes to `read`."""
        found = super().__getitem__(rows)
        self.read += found.nbytes
        return found


class Peak:
    """The peak growth of this process's anonymous memory within a `watch()` block, in bytes."""

    def __init__(self) -> None:
        self.bytes = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Sample the memory every 5 ms in a thread while the block runs."""
        before, over = _anonymous(), Event()

        def look() -> None:
            while not over.wait(0.005):
                self.bytes = max(self.bytes, _anonymous() - before)

        thread = Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def main() -> None:
    """Write a pool, select rows from its files, and compare them with the oracle's."""
    asked = _arguments()
    torch.set_num_threads(asked.threads)
    with TemporaryDirectory(prefix="spard-pool-", dir=asked.folder) as folder:
        shards = CountingShards(_write_pool(Path(folder), asked))
        task_MD = _task(asked)
        whole, peak = len(shards) * shards.shape[1] * 4, Peak()
        print(
            f"{len(shards):,} rows of {shards.shape[1]} in {-(-len(shards) // SHARD)} shards, {whole / 1e9:.2f} GB; ",
            end="",
        )
        print(f"k = {asked.k}, {len(task_MD)} task rows, {asked.threads} thread(s), {platform.machine()}, ", end="")
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        with peak.watch():
            begun = time.process_time()
            q_N = dpp.quality(shards, task_MD)
            _print_result("relevance", time.process_time() - begun, shards, whole)
            for _ in range(asked.runs):
                begun = time.process_time()
                found = dpp.greedy(shards, q_N, asked.k)
                _print_result("selection", time.process_time() - begun, shards, whole)
        print(f"anonymous memory: {peak.bytes / 1e6:.0f} MB more than before")
        if not asked.no_oracle:
            expected = oracle(shards, q_N, asked.k)
            same = next(
                (i for i, (a, b) in enumerate(zip(found.indices, expected, strict=False)) if a != b), len(expected)
            )
            print(f"order of float64 greedy in memory: the first {same} of {len(expected)} rows are the same")


def oracle(pool_ND: Vectors, q_N: Tensor, k: int, beta: float = 4.0) -> list[int]:
    """Return the `k` rows that greedy MAP selects in float64, by Gram-Schmidt over the whole pool in memory.

    Each pick takes one product with all rows. Rows within 1e-12 of the largest gain tie, and the first one is picked.
    """
    Y_ND = torch.empty(pool_ND.shape, dtype=torch.float64)
    for start in range(0, len(pool_ND), SHARD):
        rows = slice(start, start + SHARD)
        Y_ND[rows] = torch.nn.functional.normalize(pool_ND[rows].double(), dim=1) * q_N[rows].pow(beta).unsqueeze(1)
    gain_N = torch.linalg.vector_norm(Y_ND, dim=1).square()
    V_KD = Y_ND.new_zeros(k, Y_ND.shape[1])
    chosen: list[int] = []
    for t in range(k):
        chosen.append(int((gain_N >= gain_N.max() * (1 - 1e-12)).nonzero()[0]))
        v_D = Y_ND[chosen[-1]]
        for _ in range(2):
            v_D = v_D - V_KD[:t].T @ (V_KD[:t] @ v_D)
        V_KD[t] = v_D / v_D.norm()
        gain_N -= (Y_ND @ V_KD[t]).square()
        gain_N[chosen[-1]] = -1.0
    return chosen


def _print_result(what: str, seconds: float, shards: CountingShards, whole: int) -> None:
    print(f"{what}: {seconds:.2f} CPU s, {shards.read / 1e9:.2f} GB read, {shards.read / whole:.2f} times the pool")
    shards.read = 0


def _write_pool(folder: Path, asked: argparse.Namespace) -> list[Tensor]:
    """Write the random pool as shards and return them as tensors mapped from the files."""
    generator = torch.Generator().manual_seed(asked.seed)
    centers_CD, parts = _centers(asked), []
    for start in range(0, asked.rows, SHARD):
        count = min(SHARD, asked.rows - start)
        drawn = torch.randint(CLUSTERS, (count,), generator=generator)
        rows = centers_CD[drawn] + torch.randn(count, asked.dimension, generator=generator) * _spectrum(asked)
        save_file({"rows": rows}, folder / f"{start}.safetensors")
        with safe_open(folder / f"{start}.safetensors", framework="pt") as file:
            parts.append(file.get_tensor("rows"))
    return parts


def _task(asked: argparse.Namespace) -> Tensor:
    generator = torch.Generator().manual_seed(asked.seed + 1)
    drawn = torch.randint(NEAR, (asked.task_rows,), generator=generator)
    return _centers(asked)[drawn] + torch.randn(asked.task_rows, asked.dimension, generator=generator) * _spectrum(
        asked
    )


def _centers(asked: argparse.Namespace) -> Tensor:
    generator = torch.Generator().manual_seed(asked.seed + 2)
    common_D = torch.randn(1, asked.dimension, generator=generator)
    return common_D + torch.randn(CLUSTERS, asked.dimension, generator=generator)


def _spectrum(asked: argparse.Namespace) -> Tensor:
    return torch.logspace(0, -1, asked.dimension)


def _anonymous() -> int:
    found = re.search(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.huge_pool", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--task-rows", type=int, default=500)
    parser.add_argument("--k", type=int, default=225)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the files are put; a temporary folder otherwise")
    parser.add_argument("--no-oracle", action="store_true", help="do not compare with float64 greedy in memory")
    return parser.parse_args()


if __name__ == "__main__":
    main()
