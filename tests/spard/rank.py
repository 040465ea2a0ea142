"""python -m tests.spard.rank MODEL OUT RANK COUNT: one process of runs on several, one run for each defense.

It leaves the parameters and what each step reported in OUT.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from spard import distributed
from spard.config import Defense, Dpo, Hyperparameters, Lora, NoDefense, Recipe, SafeGrad, Spard, resolve
from spard.data.chat import Encoded, encode_all
from spard.models.base import Base, load_base
from spard.training.train import train
from tests.spard.parts import chat, refusals, sums

DEFENSES: dict[str, Defense] = {
    "default": Spard(),
    "closed_form": Spard(variant="closed_form", tau=1.0, safe_batch_size=3),
    "excess": Spard(bound="excess", tau=0.0, safe_batch_size=1, check_every=1),
    "gated": Spard(variant="gated", tau=1.0, safe_batch_size=1),  # one row: the other process has none
    "safegrad": SafeGrad(),
    "none": NoDefense(),
    "dpo": Spard(tau=20.0),  # never reached: safe losses are summed in float32, which a projection passes on
}


def unlearned(base: Base) -> list[Encoded]:
    """Safe rows whose answers the sums make less likely."""
    return encode_all(base.tokenizer, [chat(f"Do harm number {i}", "~" * (i + 5)) for i in range(7)], 256)


def pairs(base: Base) -> list[Encoded]:
    """Preference pairs, in batches of which one process has more than the other."""
    other = {"role": "assistant", "content": "I do not know."}
    return encode_all(base.tokenizer, [replace(chat(f"Add {i}", f"It is {i}"), rejected=other) for i in range(24)], 256)


def main() -> None:
    torch.set_num_threads(1)
    model, out, rank, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    for name, defense in DEFENSES.items():
        base = load_base(str(model), dtype=torch.float64)
        task = pairs(base) if name == "dpo" else sums(base)
        safe = unlearned(base) if name == "excess" else refusals(base)
        asked = Hyperparameters(n_epochs=2, batch_size=5)
        recipe = Recipe(defense=defense, lora=Lora(rank=4), hyperparameters=asked, learning_rate=5e-3, seed=5)
        recipe = replace(recipe, dpo=Dpo() if name == "dpo" else None)
        with distributed.joined(out / f"{name}.meeting", rank, count, base.device):
            trained = train(base, task, safe, recipe, resolve(recipe, len(task), base.hidden_size))
        weights = {part: w.detach().clone() for part, w in trained.model.named_parameters() if w.requires_grad}
        save_file(weights, out / f"{name}.{rank}.safetensors")
        (out / f"{name}.{rank}.json").write_text(json.dumps(trained.metrics))


if __name__ == "__main__":
    main()
