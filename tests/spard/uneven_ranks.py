"""python -m tests.spard.uneven_ranks MODELS OUT: two processes that have memory for passes of other lengths.

The first one leaves in OUT what they embed, and what they measure of training rows, alone and together.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch

from spard import distributed
from spard.config import Sharding
from spard.evaluation.own_refusal import own_refusal_of
from spard.losses.cross_entropy import evaluate
from spard.models import budget
from spard.models.base import Base, load_base
from spard.selection.embeddings import embed
from tests.spard.parts import sums
from tests.spard.ranks import SOON_S, ended, forked, join

TOKENS = (2000, 150)  # of a pass on each
TEXTS = [f"a prompt of number {i}{'!' * i}" for i in range(30)]
CUTS: tuple[Sharding, ...] = ("none", "full")


def main() -> None:
    """Measure on one process, and on two."""
    models, out = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    for sharding in CUTS:
        assert ended(forked(2, partial(_rank, models, out, sharding)), SOON_S) == [0, 0]


def _rank(models: Path, out: Path, sharding: Sharding, rank: int) -> None:
    alone = _measured(load_base(models / "tiny"))
    join(out / f"store.{sharding}", rank, 2)
    budget.set_tokens(TOKENS[rank])
    together = _measured(load_base(models / "tiny", sharding=sharding))
    if distributed.own() == 0:
        (out / f"{sharding}.json").write_text(json.dumps([alone, together]))


def _measured(base: Base) -> dict[str, list[float]]:
    rows, opening = sums(base, 40), tuple(base.tokenizer("I'm s")["input_ids"][:4])
    signals = own_refusal_of(base, rows, [opening], 0.0)
    return {
        "embeddings": embed(base, TEXTS).flatten().tolist(),
        "loss": [evaluate(base.model, rows, base.tokenizer.pad_token_id).loss],
        "signals": [each.probability for each in signals],
    }


if __name__ == "__main__":
    main()
