"""python -m tests.spard.ranks_of_unequal_memory MODELS OUT: two ranks, one with memory for longer passes.

The first one leaves in OUT what they embed, and what they measure of training rows, alone and together; and what judges
say that it alone has.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from spard import distributed
from spard.config import JudgeSpec, Sharding
from spard.evaluation.judges import open_judge
from spard.evaluation.own_refusal import measure_own_refusal
from spard.losses.cross_entropy import evaluate
from spard.models import budget
from spard.models.base import Base, load_base
from spard.selection.embeddings import embed
from tests.spard.parts import sums
from tests.spard.ranks import SOON_S, exit_codes, fork_ranks, join

TOKENS = (2000, 150)  # of a pass on each
TEXTS = [f"a prompt of number {i}{'!' * i}" for i in range(30)]
CUTS: tuple[Sharding, ...] = ("none", "full")


def main() -> None:
    """Measure on one process, and on two."""
    models, out = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    for sharding in CUTS:
        assert exit_codes(fork_ranks(2, partial(_rank, models, out, sharding)), SOON_S) == [0, 0]


def _rank(models: Path, out: Path, sharding: Sharding, rank: int) -> None:
    model = str(models / "tiny")
    alone = _measure_signals(load_base(model))
    join(out / f"store.{sharding}", rank, 2)
    budget.set_tokens(TOKENS[rank])
    together = _measure_signals(load_base(model, sharding=sharding))
    if distributed.rank() == 0:
        (out / f"{sharding}.json").write_text(json.dumps([alone, together]))
    said = [
        distributed.broadcast_object(_judge_in_thread(each))
        for each in (JudgeSpec("base", model=model, canaries=0), JudgeSpec("classifier", model=model, canaries=0))
    ]
    (out / f"judges.{sharding}.{rank}.json").write_text(json.dumps(said))


def _measure_signals(base: Base) -> dict[str, list[float]]:
    rows, opening = sums(base, 40), tuple(base.tokenizer("I'm s")["input_ids"][:4])
    signals = measure_own_refusal(base, rows, [opening], 0.0)
    return {
        "embeddings": embed(base, TEXTS).flatten().tolist(),
        "loss": [evaluate(base.model, rows, base.tokenizer.pad_token_id).loss],
        "signals": [each.probability for each in signals],
    }


def _judge_in_thread(spec: JudgeSpec) -> list[str]:
    """Return a judge's verdicts in words, from a thread of its own as in an audit."""
    judge = open_judge(spec)
    with ThreadPoolExecutor(1) as grader:
        verdicts = grader.submit(judge.judge, ["Add 1", "Add 2"], ["It is 1", "It is 2"]).result()
    return [each.reason for each in verdicts]


if __name__ == "__main__":
    main()
