"""python -m tests.spard.ranks MODELS OUT: every case of `CASES` trained by one process, by two and by four.

The processes are forked from one that has loaded the libraries. Each leaves in OUT what its steps reported, and its
parameters, under the case's name, the count and its rank. Runs that break off are in `tests.spard.broken_off`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch._C._distributed_c10d import FileStore

from spard import distributed
from spard.config import (
    Defense,
    Dpo,
    Ending,
    Hyperparameters,
    Lisa,
    Lora,
    NoDefense,
    Recipe,
    SafeGrad,
    SafeInstr,
    SafeLora,
    Sharding,
    Spard,
    resolve,
)
from spard.data.chat import Encoded, encode_all
from spard.models.base import Base, load_base
from spard.models.sharding import whole
from spard.training.best import Standing
from spard.training.train import EpochEnd, train
from tests.spard.parts import chat, refusals, sums

ROWS, BATCH = 11, 5  # three steps, the last one on a single row
PER_MACHINE = 2  # of four processes with hybrid sharding
ALL: tuple[tuple[int, Sharding], ...] = ((1, "none"), (2, "full"))
GROUPS: tuple[tuple[int, Sharding], ...] = (*ALL, (4, "full"), (2, "none"), (4, "hybrid"))
FEW = ("closed_form", "gated", "safegrad", "options")  # methods of four ranks, unless SPARD_SOAK asks for all
ONE = FEW[:1]  # of the groups after them, likewise


@dataclass(frozen=True)
class Case:
    """A defense, what else the recipe asks for, whether the sums break its safe rows, the model's folder and type."""

    defense: Defense
    more: dict[str, Any] = field(default_factory=dict)
    breaks: bool = False
    model: str = "tiny"
    dtype: torch.dtype = torch.float64


def _bounded(variant: Any, **more: Any) -> Spard:
    return Spard(variant=variant, tau=1.0, check_every=1, **more)


METHODS = {
    "default": Case(Spard()),
    "closed_form": Case(_bounded("closed_form", safe_batch_size=3)),
    "excess": Case(Spard(bound="excess", tau=0.0, safe_batch_size=1, check_every=1), breaks=True),
    "gated": Case(_bounded("gated", safe_batch_size=1), {"ema": 0.9}),  # one row: the other processes have none
    "preconditioned": Case(_bounded("preconditioned")),
    "reference": Case(_bounded("reference", safe_batch_size=1)),
    "safegrad": Case(SafeGrad()),
    "lisa": Case(Lisa(align_steps=1, task_steps=1, safe_batch_size=1)),
    "safeinstr": Case(SafeInstr()),
    "safelora": Case(SafeLora()),
    "none": Case(NoDefense()),
    "dpo": Case(_bounded("closed_form"), {"dpo": Dpo()}),
    "options": Case(Spard(), {"constrained_sft": True, "micro_batch_size": 1, "gradient_checkpointing": True}),
    "ending": Case(Spard(), {"ending": Ending(keep="best"), "hyperparameters": Hyperparameters(3, batch_size=BATCH)}),
    "tied": Case(_bounded("closed_form"), model="tied"),  # embeddings and head are the same weights
    "single": Case(Spard(), dtype=torch.float32),
}
PROJECTED = ("closed_form", "excess", "gated", "preconditioned", "reference", "dpo", "tied")


def name_of(method: str, *, lora: bool) -> str:
    """Return the name of a case."""
    return f"{method}.{'lora' if lora else 'full'}"


CASES = {
    name_of(method, lora=lora): (case, lora)
    for method, case in METHODS.items()
    for lora in (True, False)
    if lora or "ending" not in case.more  # which is for adapters
}


def cases_of(count: int, sharding: Sharding) -> list[str]:
    """Return the cases of a group."""
    takes_all = (count, sharding) in ALL or os.environ.get("SPARD_SOAK") == "1"
    few = FEW if (count, sharding) == (4, "full") else ONE
    return [name for name in CASES if takes_all or name.partition(".")[0] in few]


def standing(end: EpochEnd) -> Standing:
    """Find the second epoch the best on the first rank, which decides, and the worst on the others."""
    loss = 1.0 if end.epoch == 2 else 2.0
    return Standing(end.epoch, end.step, None, None, -loss if distributed.own() else loss)


def unlearned(base: Base) -> list[Encoded]:
    """Safe rows whose answers the sums make less likely."""
    return encode_all(base.tokenizer, [chat(f"Do harm number {i}", "~" * (i + 5)) for i in range(7)], 256)


def pairs(base: Base) -> list[Encoded]:
    """Preference pairs."""
    other = {"role": "assistant", "content": "I do not know."}
    rows = [replace(chat(f"Add {i}", f"It is {i}"), rejected=other) for i in range(ROWS)]
    return encode_all(base.tokenizer, rows, 256)


def recipe_of(case: Case, models: Path, *, lora: bool) -> Recipe:
    """Return the recipe of a case."""
    defense = case.defense
    if isinstance(defense, SafeLora):
        defense = replace(defense, base_unaligned=str(models / "unaligned"))
    asked = Hyperparameters(n_epochs=1, batch_size=BATCH)
    adapter = Lora(rank=4) if lora else None
    recipe = Recipe(defense=defense, lora=adapter, hyperparameters=asked, learning_rate=5e-3, seed=5)
    return replace(recipe, **case.more)


def trained(
    models: Path, name: str, sharding: Sharding, **more: Any
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Return the weights that a case leaves and what its steps reported; `more` is for `train`."""
    case, lora = CASES[name]
    base = load_base(str(models / case.model), dtype=case.dtype)
    recipe = replace(recipe_of(case, models, lora=lora), sharding=sharding, checkpoint_every_s=1e-9)
    task = pairs(base) if recipe.dpo else sums(base, ROWS)
    safe = unlearned(base) if case.breaks else refusals(base)
    more |= {"compare": standing} if recipe.ending.compares else {}
    found = train(base, task, safe, recipe, resolve(recipe, len(task), base.hidden_size), **more)
    if recipe.ending.compares:
        assert found.ended, "nothing was compared"
        assert found.ended.released.epoch == 2
    weights = {part: whole(w.detach()).clone() for part, w in found.model.named_parameters() if w.requires_grad}
    return weights, found.metrics


def join(store: Path, rank: int, count: int) -> None:
    """Become a rank of a group; a group of one is none."""
    if count > 1:
        os.environ["LOCAL_WORLD_SIZE"] = str(PER_MACHINE)
        dist.init_process_group("gloo", store=FileStore(str(store), count), rank=rank, world_size=count)


def forked(count: int, work: Callable[[int], None]) -> list[int]:
    """Start processes that do the work of a rank each; return their numbers. They end with 1 where that fails."""
    started = []
    for rank in range(count):
        if (child := os.fork()) == 0:
            try:
                work(rank)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        started.append(child)
    return started


def ended(started: Sequence[int]) -> list[int]:
    """Wait for processes and return what they ended with."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in started]


def _rank(models: Path, out: Path, count: int, sharding: Sharding, rank: int) -> None:
    join(out / f"store.{count}.{sharding}", rank, count)
    for name in cases_of(count, sharding):
        weights, metrics = trained(models, name, sharding)
        left = f"{name}.{count}.{sharding}.{rank}"
        if rank in (0, count - 1):
            save_file(weights, out / f"{left}.safetensors")
        (out / f"{left}.json").write_text(json.dumps(metrics))


def main() -> None:
    """Fork the processes of all counts, and end as the worst of them ended."""
    models, out = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    started = []
    for count, sharding in GROUPS:
        started += forked(count, partial(_rank, models, out, count, sharding))
    sys.exit(max(map(abs, ended(started))))


if __name__ == "__main__":
    main()
