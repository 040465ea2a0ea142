"""Selection from shards that are mapped from their files takes little memory of its own, however large the pool is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from spard.config import Selection
from tests.spard.oracles import cosines, greedy_map
from tests.spard.select_mapped import map_rows

GIB = 1 << 30
WIDTH, SHARD, K = 384, 32_768, 24
ROWS = 1_000_000 if os.environ.get("SPARD_SOAK") == "1" else 100_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pool in shards, written one by one, and a task near some of its rows."""
    centers = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(0))
    for start in range(0, ROWS, SHARD):
        save_file(
            {"rows": draw_rows(centers, min(SHARD, ROWS - start), start)}, tmp_path / f"pool-{start:08}.safetensors"
        )
    save_file({"rows": draw_rows(centers[:5], 50, ROWS)}, tmp_path / "task.safetensors")
    return tmp_path


def draw_rows(centers: Tensor, rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    noise = 0.4 * torch.randn(rows, WIDTH, generator=generator)
    return centers[torch.randint(len(centers), (rows,), generator=generator)] + noise


def test_selection_from_files_holds_no_pool_in_memory_and_takes_the_order_of_float64(folder: Path) -> None:
    command = [sys.executable, "-m", "tests.spard.select_mapped", str(folder), str(K)]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=600).stdout)

    assert told["rows"] == ROWS
    assert 0 < told["before"] <= told["peak"] < 2 * GIB
    assert told["peak"] - told["before"] < WIDTH * 4 * ROWS / 2, "the pool was copied"
    assert told["chosen"] == expected_order(folder)


def expected_order(folder: Path) -> list[int]:
    """The order in memory, in float64. Rows far from the task are left out of a large pool: their gain is 0 or near."""
    pool_ND = torch.cat([map_rows(path) for path in sorted(folder.glob("pool-*.safetensors"))])
    q_N = torch.cat([part.amax(dim=1) for part in (cosines(each, task(folder)) for each in pool_ND.split(SHARD))])
    near = q_N.topk(ROWS // 25).indices.sort().values  # the task is near 5 of 200 centers: 1 in 40
    found = greedy_map(pool_ND[near], q_N[near].clamp(0, 1), K, Selection().beta)
    rest = q_N.clone()
    rest[near] = 0
    R_ND = pool_ND[near[found]].double()
    assert float(rest.max()) ** (2 * Selection().beta) < last_gain(R_ND, q_N[near[found]]), (
        "rows that were left out count"
    )
    return [int(near[i]) for i in found]


def last_gain(chosen_KD: Tensor, q_K: Tensor) -> float:
    """The gain of the last row chosen: no gain before is smaller, and none of a row exceeds its own squared length."""
    R_KD = torch.nn.functional.normalize(chosen_KD, dim=1) * q_K.pow(Selection().beta).unsqueeze(1)
    _, r_KK = torch.linalg.qr(R_KD.T)
    return float(r_KK[-1, -1].square())


def task(folder: Path) -> Tensor:
    return map_rows(folder / "task.safetensors")
