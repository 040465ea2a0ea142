"""Compare our DPP selection with other algorithms for time, memory and the selected rows.

Run `python -m benchmarks.selection --pool POOL.jsonl --task TASK.jsonl`. The others are reimplemented from their
descriptions and get the same relevances:

- published: the algorithm in the SPARD paper's code, a dense kernel with jitter 1e-6; each pick copies the candidates'
  kernel rows and solves a triangular system for all of them from scratch;
- no copies: the same algorithm, but the selected rows are read in place;
- fast-map-dpp: Chen et al. (2018), Algorithm 1, a dense kernel and one new Cholesky row per pick.

No embedding model is needed: texts become counts of hashed words and word pairs, projected to `--dimension` by a seeded
random matrix. Times are median CPU seconds with their range; memory is the peak growth of the resident set. Without
files the rows are random vectors.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, normalize

from spard.selection import dpp

BUCKETS = 2**15
JITTER = 1e-6


@dataclass(frozen=True, slots=True)
class Timing:
    """The CPU seconds of each run of one algorithm, its peak memory in MB, and the rows it selected, in order."""

    name: str
    runs: list[float]  # CPU seconds
    peak_mb: float
    order: list[int]

    @property
    def seconds(self) -> float:
        """Return the median CPU seconds."""
        return median(self.runs)


def main() -> None:
    """Run all algorithms on one input; print their times, their memory, and how far they agree with the oracle."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    pool_ND, task_MD = _inputs(args)
    start = time.process_time()
    q_N = dpp.quality(pool_ND, task_MD)
    relevance_s = time.process_time() - start
    oracle = greedy_oracle(pool_ND, q_N, args.k)

    ours = measure("ours", lambda: dpp.greedy(pool_ND, q_N, args.k).indices, args.runs)
    fast = measure("fast-map-dpp", lambda: fast_map(pool_ND, q_N, args.k), args.runs)
    lean = measure("no copies", lambda: schur_greedy(pool_ND, q_N, args.k, _in_place), 1)
    timings = [ours, fast, lean]
    if not args.quick:
        timings.append(measure("published", lambda: schur_greedy(pool_ND, q_N, args.k, _by_copies), 1))

    print(f"{len(pool_ND)} rows, d = {pool_ND.shape[1]}, k = {args.k}, {len(task_MD)} task rows, ", end="")
    print(f"{args.threads} thread, {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"relevance, before any of them: {relevance_s:.3f} CPU s")
    print(f"{'':14}{'CPU s':>10}{'range':>16}{'x ours':>9}{'peak MB':>10}{'same order':>12}{'in common':>11}")
    for each in timings:
        common = len(set(each.order) & set(oracle))
        spread = f"{min(each.runs):.3f}-{max(each.runs):.3f}"
        print(
            f"{each.name:14}{each.seconds:10.3f}{spread:>16}{each.seconds / ours.seconds:9.1f}{each.peak_mb:10.1f}"
            f"{_prefix(each.order, oracle):8}/{len(oracle):<4}{common:6}/{len(oracle)}"
        )
    print("order and overlap: against float64 greedy over the whole pool, past the rank left out")


def greedy_oracle(pool_ND: Tensor, q_N: Tensor, k: int, beta: float = 4.0) -> list[int]:
    """Return at most `k` rows that greedy MAP selects, by float64 Gram-Schmidt over the whole pool.

    `pool_ND` are the embeddings `[N, D]`, `q_N` the relevances `[N]`. The result is shorter than `k` where the pool's
    numerical rank is smaller. Rows within 1e-12 of the largest gain tie, and the first one is picked.
    """
    R_ND = normalize(pool_ND.double(), dim=1) * q_N.double().pow(beta).unsqueeze(1)
    floor_N = R_ND.square().sum(dim=1) * 2.0**-40
    chosen: list[int] = []
    while len(chosen) < k:
        gain_N = torch.linalg.vector_norm(R_ND, dim=1).square()
        gain_N[gain_N <= floor_N] = 0.0
        if gain_N.max() == 0:
            break
        chosen.append(int((gain_N >= gain_N.max() * (1 - 1e-12)).nonzero()[0]))
        v_D = R_ND[chosen[-1]] / R_ND[chosen[-1]].norm()
        R_ND.addr_(R_ND @ v_D, v_D, alpha=-1)
    return chosen


def fast_map(pool_ND: Tensor, q_N: Tensor, k: int) -> list[int]:
    """Return the `k` rows of Algorithm 1 of Chen et al. (2018), on a dense float32 kernel."""
    L_NN = _kernel(pool_ND, q_N)
    gain_N = L_NN.diagonal().clone()
    C_KN = torch.zeros(k, len(L_NN))
    chosen: list[int] = []
    for t in range(k):
        j = int(gain_N.argmax())
        C_KN[t] = (L_NN[j] - C_KN[:t, j] @ C_KN[:t]) / gain_N[j].clamp(min=1e-20).sqrt()
        gain_N -= C_KN[t].square()
        gain_N[j] = -torch.inf
        chosen.append(j)
    return chosen


def schur_greedy(pool_ND: Tensor, q_N: Tensor, k: int, rows: Callable[[Tensor, list[int]], Tensor]) -> list[int]:
    """Return the `k` rows of greedy MAP by Schur complements, as the SPARD paper's code computes them.

    Each pick solves C V = L[S, :] from scratch, where C is the Cholesky factor of the selected rows S; gains are
    clamped at the jitter. `rows(L_NN, chosen)` returns L[S, :], with or without copies of the kernel.
    """
    L_NN = _kernel(pool_ND, q_N)
    L_NN.diagonal().add_(JITTER)
    diagonal_N = L_NN.diagonal().clone()
    factor_KK = torch.zeros(k, k)
    chosen = [int(diagonal_N.argmax())]
    factor_KK[0, 0] = diagonal_N[chosen[0]].sqrt()
    for t in range(1, k):
        V_TN = torch.linalg.solve_triangular(factor_KK[:t, :t], rows(L_NN, chosen), upper=False)
        gain_N = (diagonal_N - V_TN.square().sum(dim=0)).clamp(min=JITTER)
        gain_N[chosen] = -torch.inf
        j = int(gain_N.argmax())
        factor_KK[t, :t], factor_KK[t, t] = V_TN[:, j], gain_N[j].sqrt()
        chosen.append(j)
    return chosen


def _in_place(L_NN: Tensor, chosen: list[int]) -> Tensor:
    return L_NN[chosen]


def _by_copies(L_NN: Tensor, chosen: list[int]) -> Tensor:
    """Return the selected rows through a copy of all candidates' kernel rows (here: of every row), as published."""
    return L_NN[list(range(len(L_NN)))][:, chosen].T


def hash_features(texts: Sequence[str], dimension: int, seed: int = 0) -> Tensor:
    """Return an `[N, dimension]` matrix: counts of hashed words and word pairs, projected by a seeded random matrix."""
    generator = torch.Generator().manual_seed(seed)
    projection = torch.randn(BUCKETS, dimension, generator=generator) / dimension**0.5
    bags = [_buckets(text) for text in texts]
    starts = torch.tensor([0, *[len(bag) for bag in bags]][:-1]).cumsum(dim=0)
    return embedding_bag(torch.tensor([i for bag in bags for i in bag]), projection, starts, mode="sum")


def read_texts(path: Path) -> list[str]:
    """Return the `prompt` (or else `question`) of each row of a JSONL file."""
    rows = (json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip())
    return [str(row.get("prompt") or row.get("question")) for row in rows]


def measure(name: str, run: Callable[[], list[int]], runs: int) -> Timing:
    """Run an algorithm `runs` times; return the CPU seconds of each run and the growth of memory in the first one."""
    before = _reset_peak()
    seconds, order = [], []
    peak = 0.0
    for _ in range(runs):
        start = time.process_time()
        order = run()
        seconds.append(time.process_time() - start)
        peak = peak or _status("VmHWM") - before
    return Timing(name, seconds, peak / 1024, order)


def _kernel(pool_ND: Tensor, q_N: Tensor, beta: float = 4.0) -> Tensor:
    """Return the float32 kernel `[N, N]`; numpy computes only half of the product of a matrix with its transpose."""
    y_ND = (normalize(pool_ND.float(), dim=1) * q_N.float().pow(beta).unsqueeze(1)).numpy()
    return torch.from_numpy(y_ND @ y_ND.T)


def _buckets(text: str) -> list[int]:
    words = re.findall(r"\w+", text.lower())
    pairs = [f"{a} {b}" for a, b in pairwise(words)]
    return [zlib.crc32(term.encode()) % BUCKETS for term in [*words, *pairs]] or [0]


def _inputs(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    if not args.pool:
        generator = torch.Generator().manual_seed(args.seed)
        spectrum_D = torch.logspace(0, -1.2, args.dimension)
        if args.clusters:
            return _clustered_pool(args, generator, spectrum_D)
        rows = torch.randn(args.rows + 500, args.dimension, generator=generator) * spectrum_D
        rows += torch.randn(1, args.dimension, generator=generator)
        return rows[:-500], rows[-500:]
    pool = [text for path in args.pool for text in read_texts(path)]
    task = [text for path in args.task for text in read_texts(path)]
    step = max(1, 10 * len(pool) // max(1, len(task)))
    task += [f"Please: {text}" for text in pool[::step]]  # stands for a tenth of harmful rows in the training file
    print("embeddings: hashed words and word pairs, randomly projected; no embedding model")
    return hash_features(pool, args.dimension), hash_features(task, args.dimension)


def _clustered_pool(args: argparse.Namespace, generator: torch.Generator, spectrum_D: Tensor) -> tuple[Tensor, Tensor]:
    """Return random pool rows around `--clusters` centers, and 500 task rows around 2% of the centers."""
    centers_CD = torch.randn(args.clusters, args.dimension, generator=generator)
    centers_CD += torch.randn(1, args.dimension, generator=generator)

    def draw_vectors(count: int, of: int) -> Tensor:
        place = torch.randint(of, (count,), generator=generator)
        return centers_CD[place] + torch.randn(count, args.dimension, generator=generator) * spectrum_D

    return draw_vectors(args.rows, args.clusters), draw_vectors(500, max(1, args.clusters // 50))


def _prefix(order: Sequence[int], oracle: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(order, oracle, strict=False)) if a != b), len(oracle))


def _reset_peak() -> float:
    """Reset the kernel's peak of the resident set (Linux), and return the KiB in use."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> float:
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return float(found[1]) if found else 0.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", type=Path, action="append", default=[], help="JSONL rows with a prompt; repeatable")
    parser.add_argument("--task", type=Path, action="append", default=[], help="JSONL rows with a prompt or question")
    parser.add_argument("--rows", type=int, default=8752, help="synthetic pool rows when no --pool is given")
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--clusters", type=int, default=0, help="draw rows around so many centers; 0: around one")
    parser.add_argument("--k", type=int, default=300)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="leave out `published`, which takes minutes")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
