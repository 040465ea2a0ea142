"""Measure the training time of each defense as a multiple of plain fine-tuning.

Run `python -m benchmarks.defenses [--size 50m] [--steps 8] [--rounds 3] [--device cuda]`. Each defense trains a LoRA
adapter of rank 16 on the same random chats, at batch sizes 4 and 16, in one process and in alternating rounds
(`spard bench overhead`). The result is the CPU time (on a GPU the wall time, in bfloat16) divided by that of plain
fine-tuning in the same round. The model has random weights, so it refuses nothing and no row is dropped; on a real
model the projection happens more or less often, which changes its cost. The time includes measuring tau, but not
embedding and selecting the safe rows, which happen once per job.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import yaml
from spard_lab.bench.__main__ import main as bench

from benchmarks.training import SHAPES, write_model, write_rows

METHODS = "none,ptst,safeinstr,lisa,safegrad,safelora,spard_paper,spard_authors,none+anchor,spard+anchor_weight=0,spard"
ROWS, HARMFUL, POOL = 300, 30, 400  # numbers of random chats


def main() -> None:
    """Write the random files and run `spard bench overhead` on them."""
    asked = _arguments()
    with TemporaryDirectory(prefix="spard-defenses-") as name:
        folder = Path(name)
        recipe = _write(folder, asked.size, asked.seed, has_twin="safelora" in asked.methods)
        print(f"{asked.size}, load {os.getloadavg()[0]:.1f}")
        command = ["overhead", "--recipe", str(recipe), "--methods", asked.methods, "--seeds", "1"]
        command += ["--batch-sizes", asked.batch_sizes, "--rounds", str(asked.rounds), "--steps", str(asked.steps)]
        command += ["--device", asked.device, "--threads", str(asked.threads), "--out", str(folder / "out")]
        raise SystemExit(bench(command))


def _write(folder: Path, size: str, seed: int, *, has_twin: bool) -> Path:
    """Write a random model, its data files and a recipe, and with `has_twin` an unaligned model; return the recipe."""
    chats = write_rows(folder / "chats.jsonl", ROWS + 2 * HARMFUL + POOL, seed)
    drawn = [[each["content"] for each in json.loads(line)["messages"]] for line in chats.read_text().splitlines()]
    Random(seed).shuffle(drawn)
    write_model(folder / "model", chats, size, seed)
    twin = write_model(folder / "unaligned", chats, size, seed + 1) if has_twin else None
    rest = iter(drawn)
    for name, count, keys in (
        ("task", ROWS, ("prompt", "completion")),
        ("harm", HARMFUL, ("prompt", "completion")),
        ("ask", HARMFUL, ("prompt",)),
        ("pool", POOL, ("prompt", "safe")),
    ):
        rows = [dict(zip(keys, next(rest), strict=False)) for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "type": "files",
        "model": str(folder / "model"),
        **({"base_unaligned": str(twin)} if twin else {}),
        "task": "task.jsonl",
        "attacks": [{"name": "harm", "rows": "harm.jsonl", "suite": "ask.jsonl"}],
        "pools": [{"name": "drawn", "path": "pool.jsonl"}],
        "suites": [{"name": "kind", "kind": "benign", "path": "ask.jsonl"}],
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.defenses", description=__doc__)
    parser.add_argument("--size", choices=tuple(SHAPES), default="5m", help="of the random model")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--batch-sizes", default="4,16")
    parser.add_argument("--steps", type=int, default=8, help="of each training")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
