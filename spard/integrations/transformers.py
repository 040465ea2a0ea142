"""SPARD as a callback of transformers' Trainer, and so of every trainer built on it.

trainer = Trainer(..., callbacks=[SpardCallback(read_pool(Path("safe.jsonl")))])
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import TrainerCallback

from spard.config import Spard
from spard.data.batches import collate
from spard.data.chat import Encoded, encode_all, set_plain_template
from spard.data.rows import Example
from spard.errors import InvalidData, InvalidRecipe
from spard.losses.cross_entropy import evaluate
from spard.losses.gradients import Loss, safe_losses
from spard.losses.vectors import Vector
from spard.methods.base import Metrics
from spard.methods.spag import base_tau, constraint_of, safety_half
from spard.models.lora import dropping_modules
from spard.training.resume_state import load, newest_first, save
from spard.training.schedules import safe_rows

log = logging.getLogger(__name__)

_FOLDER = "spard"  # inside each of the trainer's checkpoints
_ANY_LENGTH = 2**31


class SpardCallback(TrainerCallback):
    """After every optimizer step of the trainer, the safety half of a SPAG step on rows of `safe`.

    tau "auto" is measured when training begins, and kept in the trainer's checkpoints with everything that an exact
    resume needs. The trainer runs in one process. `metrics` has one entry for each step.
    """

    def __init__(self, safe: Sequence[Example], defense: Spard | None = None, seed: int = 0) -> None:
        if not safe:
            raise InvalidData("there are no safe examples to train on")
        self.examples, self.defense, self.seed = safe, defense or Spard(), seed
        self.tau: dict[str, float] = {}
        self.drawn = 0
        self.metrics: list[Metrics] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tokenize the safe rows, and measure tau or read it from the checkpoint that the trainer resumes from."""
        if args.world_size > 1:
            raise InvalidRecipe("SpardCallback works in one process; safe losses are not averaged over ranks")
        model, tokenizer = kwargs["model"], copy.deepcopy(kwargs["processing_class"])
        set_plain_template(tokenizer)
        self.model = model.get_base_model() if isinstance(model, PeftModel) else model
        self.theta = [part for part in model.parameters() if part.requires_grad]
        self.safety = safety_half(self.defense, state.max_steps)
        self.dropping, self.pad_id = dropping_modules(model), tokenizer.pad_token_id
        self.safe: list[Encoded] = encode_all(tokenizer, self.examples, _ANY_LENGTH)
        if state.global_step:
            self._restore(Path(args.output_dir) / f"checkpoint-{state.global_step}" / _FOLDER)
        else:
            self.tau = base_tau(self.defense, lambda: evaluate(self.model, self.safe, self.pad_id))
            log.info("safe losses are held at %s", self.tau)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the safety step; `.grad` of the utility loss has been used by now."""
        constraint = constraint_of(self.defense, self.tau)
        self._set_dropout(False)
        self.metrics.append(self.safety(self.theta, self._losses, kwargs["optimizer"], constraint))
        self._set_dropout(True)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put tau, the place in the safe rows and moments beside the trainer's checkpoint."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        save(folder / _FOLDER, state.global_step, self.safety.state(), {"tau": self.tau, "drawn": self.drawn})

    def _restore(self, folder: Path) -> None:
        found = next(newest_first(folder), None)
        if found is None:
            raise InvalidRecipe(f"{folder} is not there; without it a resumed run does not know its tau")
        tensors, state = load(found)
        self.tau, self.drawn = state["tau"], state["drawn"]
        self.safety.restore(self.theta, tensors)

    def _losses(self) -> dict[str, Loss]:
        rows = safe_rows(self.seed, self.drawn, len(self.safe), self.defense.safe_batch_size)
        self.drawn += 1
        batch = collate([self.safe[row] for row in rows], self.pad_id, self.theta[0].device)
        theta: Vector = self.theta
        return safe_losses(self.model, theta, batch)

    def _set_dropout(self, on: bool) -> None:
        for module in self.dropping:
            module.training = on
