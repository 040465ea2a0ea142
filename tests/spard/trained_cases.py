"""python -m tests.spard.trained_cases MODELS OUT cpu|cuda|nccl CASE...: train cases of `tests.spard.ranks`.

It leaves their weights and metrics in OUT. With `nccl` the process is the one rank of a group, and its weights are cut
over that rank (FSDP2), which a run on one process does not do: what is gathered and reduced goes through NCCL, though
to nobody else.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from spard.config import Sharding
from spard.models import sharding as cutting
from tests.spard.ranks import train_case


def main() -> None:
    """Train every case and leave weights and what the steps reported, by its name."""
    models, out, place = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    sharding: Sharding = "none"
    if place == "nccl":
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        dist.init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
        sharding = "full"
    found = {}
    for name in sys.argv[4:]:
        with patch("spard.training.train.shard_", _cut_) if place == "nccl" else nullcontext():
            weights, metrics = train_case(models, name, sharding)
        found[name] = ({part: w.cpu() for part, w in weights.items()}, metrics)
    torch.save(found, out)
    if place == "nccl":
        dist.destroy_process_group()


def _cut_(model: Any, sharding: Sharding, device: torch.device) -> None:
    model.to(device)
    cutting._cut(model, cutting._mesh(sharding, device))


if __name__ == "__main__":
    main()
