"""Selection from a pool that lies in files: `python -m benchmarks.huge_pool [--rows 1000000 --dimension 384]`.

Embeddings are drawn around clusters, of which the task is near a few, and written as shards, as a worker's cache has
them. Printed are CPU seconds and read bytes of relevance and selection, and how much memory grew that no file stands
for (RssAnon, looked at every few milliseconds). Then the choice is compared with float64 greedy over the whole pool in
memory, row by row and in order; `--no-oracle` leaves that out, which takes twice the pool's float32 bytes.
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
NEAR = 40  # clusters that the task is about


class Counted(Shards):
    """Counts the bytes of the rows that are asked for."""

    read = 0

    def __getitem__(self, rows: slice | Tensor | Sequence[int]) -> Tensor:
        """Return rows as of `Shards`."""
        found = super().__getitem__(rows)
        self.read += found.nbytes
        return found


class Peak:
    """The most anonymous memory of this process inside a block, above what it began with."""

    def __init__(self) -> None:
        self.bytes = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Look on while the block runs."""
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
    """Write a pool, choose from its files, and compare."""
    asked = _arguments()
    torch.set_num_threads(asked.threads)
    with TemporaryDirectory(prefix="spard-pool-", dir=asked.folder) as folder:
        shards = Counted(_write_pool(Path(folder), asked))
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
    """Greedy MAP in float64 with one gain for each row, and a product with the whole pool at each pick."""
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


def _print_result(what: str, seconds: float, shards: Counted, whole: int) -> None:
    print(f"{what}: {seconds:.2f} CPU s, {shards.read / 1e9:.2f} GB read, {shards.read / whole:.2f} times the pool")
    shards.read = 0


def _write_pool(folder: Path, asked: argparse.Namespace) -> list[Tensor]:
    """Write the pool in shards and map them."""
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
