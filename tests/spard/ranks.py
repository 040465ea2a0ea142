"""python -m tests.spard.ranks MODELS OUT: every case of `CASES` trained by one process, by two and by four.

The processes are forked from one that has loaded the libraries. Each leaves in OUT what its steps reported, and its
parameters, under the case's name, the count and its rank. Runs that break off are in `tests.spard.broken_off`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
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
    Ptst,
    Recipe,
    SafeGrad,
    SafeInstr,
    SafeLora,
    Sharding,
    Spard,
    resolve,
)
from spard.data.chat import EncodedSample, encode_all
from spard.losses.cross_entropy import evaluate
from spard.models.base import Base, load_base
from spard.models.sharding import whole
from spard.training.epoch_ends import EpochResult
from spard.training.train import EpochEnd, train
from tests.spard.parts import chat, refusals, sums, write_model

ROWS, BATCH = 11, 5  # three steps, the last one on a single row
SOON_S = 60.0  # in which a rank that waits for another one has heard of it, or gives up
PER_MACHINE = 2  # of four processes with hybrid sharding
ALL: tuple[tuple[int, Sharding], ...] = ((1, "none"), (2, "full"))
GROUPS: tuple[tuple[int, Sharding], ...] = (*ALL, (4, "full"), (2, "none"), (4, "hybrid"))
SOME = ("closed_form", "few", "one", "cut")  # methods of the groups after them, unless SPARD_SOAK asks for all


@dataclass(frozen=True)
class Case:
    """A defense, what else the recipe asks for, whether the sums break its safe rows, the model's folder and type.

    `rows` are those of the whole file. With `answers` the model answers before it is trained, and after.
    """

    defense: Defense
    more: dict[str, Any] = field(default_factory=dict)
    breaks: bool = False
    model: str = "tiny"
    dtype: torch.dtype = torch.float64
    rows: int = ROWS
    answers: bool = False


def _bounded_spard(variant: Any, tau: float = 1.0, **more: Any) -> Spard:
    return Spard(variant=variant, tau=tau, check_every=1, **more)


METHODS = {
    "default": Case(Spard()),
    "trust_region": Case(_bounded_spard("trust_region")),
    "closed_form": Case(_bounded_spard("closed_form", safe_batch_size=3)),
    "excess": Case(Spard(bound="excess", tau=0.0, safe_batch_size=1, check_every=1), breaks=True),
    "gated": Case(_bounded_spard("gated", safe_batch_size=1), {"ema": 0.9}),  # one row: the other processes have none
    "preconditioned": Case(_bounded_spard("preconditioned")),
    "reference": Case(_bounded_spard("reference", safe_batch_size=1)),
    "safegrad": Case(SafeGrad()),
    "lisa": Case(Lisa(align_steps=1, task_steps=1, safe_batch_size=1)),
    "safeinstr": Case(SafeInstr()),
    "safelora": Case(SafeLora()),
    "ptst": Case(Ptst()),
    "none": Case(NoDefense()),
    "dpo": Case(_bounded_spard("closed_form"), {"dpo": Dpo()}),
    "options": Case(Spard(), {"constrained_sft": True, "micro_batch_size": 1, "gradient_checkpointing": True}),
    "ending": Case(Spard(), {"ending": Ending(keep="best"), "hyperparameters": Hyperparameters(3, batch_size=BATCH)}),
    "tied": Case(_bounded_spard("closed_form"), model="tied"),  # embeddings and head are the same weights
    "cut": Case(  # a safe batch in several passes, on some ranks more than on others
        _bounded_spard("trust_region", tau=0.0, bound="excess", safe_batch_size=5), {"pass_tokens": 64}, breaks=True
    ),
    "few": Case(_bounded_spard("trust_region"), {"hyperparameters": Hyperparameters(3, batch_size=BATCH)}, rows=3),
    "one": Case(SafeGrad(), {"hyperparameters": Hyperparameters(3, batch_size=BATCH)}, rows=1),
    "single": Case(Spard(), dtype=torch.float32),
    "half": Case(SafeGrad(), dtype=torch.bfloat16, answers=True),  # as on a GPU
    "half_tied": Case(SafeGrad(), dtype=torch.bfloat16, answers=True, model="tied"),
}
PROJECTED = (
    "trust_region",
    "closed_form",
    "excess",
    "gated",
    "preconditioned",
    "reference",
    "dpo",
    "tied",
    "cut",
    "few",
)


def case_name(method: str, *, lora: bool) -> str:
    """Return the method with `.lora` or `.full`, the key in `CASES`."""
    return f"{method}.{'lora' if lora else 'full'}"


CASES = {
    case_name(method, lora=lora): (case, lora)
    for method, case in METHODS.items()
    for lora in (True, False)
    if lora or "ending" not in case.more  # which is for adapters
}


def group_cases(count: int, sharding: Sharding) -> list[str]:
    """Return which cases run on so many ranks; all of them in a soak, else some."""
    takes_all = (count, sharding) in ALL or os.environ.get("SPARD_SOAK") == "1"
    return [name for name in CASES if takes_all or name.partition(".")[0] in SOME]


def write_models(folder: Path) -> None:
    """Write the models that cases are trained on, and the second one that SafeLoRA compares with."""
    write_model(folder / "tiny")
    write_model(folder / "tied", "smollm")
    write_model(folder / "unaligned", initializer_range=0.1)


def standing(end: EpochEnd) -> EpochResult:
    """Find the second epoch the best on the first rank, which decides, and the worst on the others."""
    loss = 1.0 if end.epoch == 2 else 2.0
    return EpochResult(end.epoch, end.step, None, None, -loss if distributed.rank() else loss)


def unlearned_rows(base: Base) -> list[EncodedSample]:
    """Safe rows whose answers the sums make less likely."""
    return encode_all(base.tokenizer, [chat(f"Do harm number {i}", "~" * (i + 5)) for i in range(7)], 256)


def pairs(base: Base, n: int) -> list[EncodedSample]:
    """Preference pairs."""
    other = {"role": "assistant", "content": "I do not know."}
    rows = [replace(chat(f"Add {i}", f"It is {i}"), rejected=other) for i in range(n)]
    return encode_all(base.tokenizer, rows, 256)


def case_recipe(case: Case, models: Path, *, lora: bool) -> Recipe:
    """Return what a run of the case trains with, on the models in a folder."""
    defense = case.defense
    if isinstance(defense, SafeLora):
        defense = replace(defense, base_unaligned=str(models / "unaligned"))
    asked = Hyperparameters(n_epochs=1, batch_size=BATCH)
    adapter = Lora(rank=4) if lora else None
    recipe = Recipe(defense=defense, lora=adapter, hyperparameters=asked, learning_rate=5e-3, seed=5)
    return replace(recipe, **case.more)


def train_case(
    models: Path, name: str, sharding: Sharding, epochs: int | None = None, **more: Any
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Return the weights that a case leaves and what its steps reported; `more` is for `train`."""
    case, lora = CASES[name]
    if epochs:
        case = replace(case, more=case.more | {"hyperparameters": Hyperparameters(epochs, batch_size=BATCH)})
    base = load_base(str(models / case.model), dtype=case.dtype, sharding=sharding if case.answers else "none")
    recipe = replace(case_recipe(case, models, lora=lora), sharding=sharding, checkpoint_every_s=1e-9)
    task = pairs(base, case.rows) if recipe.dpo else sums(base, case.rows)
    safe = unlearned_rows(base) if case.breaks else refusals(base)
    more |= {"compare": standing} if recipe.ending.compares else {}
    losses = [evaluate(base.model, task, base.tokenizer.pad_token_id).loss] if case.answers else []
    found = train(base, task, safe, recipe, resolve(recipe, len(task), base.hidden_size), **more)
    for before in losses:
        assert evaluate(base.model, task, base.tokenizer.pad_token_id).loss < before, "nothing was learned"
    if recipe.ending.compares:
        assert found.ended, "nothing was compared"
        assert found.ended.released.epoch == 2
    weights = {part: whole(w.detach()).clone() for part, w in found.model.named_parameters() if w.requires_grad}
    return weights, found.metrics


def join(store: Path, rank: int, count: int) -> None:
    """Become a rank of a group; a group of one is none."""
    if count > 1:
        os.environ["LOCAL_WORLD_SIZE"] = str(PER_MACHINE)
        patience = timedelta(seconds=SOON_S)
        files = FileStore(str(store), count)
        dist.init_process_group("gloo", store=files, rank=rank, world_size=count, timeout=patience)


def fork_ranks(count: int, work: Callable[[int], None]) -> list[int]:
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


def exit_codes(started: Sequence[int], within_s: float) -> list[int]:
    """Return what processes ended with; those that have not within so many seconds are killed, and it fails."""
    found, until = dict[int, int](), time.monotonic() + within_s
    while len(found) < len(started):
        for child in set(started) - found.keys():
            pid, how = os.waitpid(child, os.WNOHANG)
            if pid:
                found[child] = os.waitstatus_to_exitcode(how)
            elif time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
                found[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(0.01)
    assert time.monotonic() < until, f"ranks hung for {within_s:.0f} s"
    return [found[child] for child in started]


def _rank(models: Path, out: Path, count: int, sharding: Sharding, rank: int) -> None:
    join(out / f"store.{count}.{sharding}", rank, count)
    for name in group_cases(count, sharding):
        weights, metrics = train_case(models, name, sharding)
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
        started += fork_ranks(count, partial(_rank, models, out, count, sharding))
    sys.exit(max(map(abs, exit_codes(started, 780.0))))


if __name__ == "__main__":
    main()
