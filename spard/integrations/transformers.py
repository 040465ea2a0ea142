"""SPARD as a callback of transformers' Trainer, and so of every trainer built on it.

pool, rows = Path("pool.jsonl"), read_examples(Path("train.jsonl"))
trainer = Trainer(..., callbacks=[SpardCallback(read_pool(pool), rows=rows, benign=read_benign(pool))])
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from spard.config import Anchors, Spard
from spard.data.rows import Example
from spard.errors import InvalidData, InvalidRecipe
from spard.integrations.safe_rows import ANCHORS, SafeRows
from spard.methods.base import Metrics
from spard.methods.spag import make_constraint, safety_half
from spard.training.resume_state import load, newest_first, save

log = logging.getLogger(__name__)

_FOLDER = "spard"  # inside each of the trainer's checkpoints
_ROWS = "rows/"  # prefix of the safe rows' tensors there


class SpardCallback(TrainerCallback):
    """Add the anchor's gradient before every optimizer step of the trainer, and take the safety step after it.

    `safe` and `benign` are the rows of a safety pool, `rows` the training rows that the safe rows are disguised as (see
    `SafeRows`). tau "auto" is measured when training begins and saved in the trainer's checkpoints, with everything
    else for an exact resume; a run resumed from a checkpoint without anchor, variants or disguised prompts continues
    without them. The trainer must use one process. `metrics` has one entry per step.
    """

    def __init__(
        self,
        safe: Sequence[Example],
        defense: Spard | None = None,
        seed: int = 0,
        rows: Sequence[Example] = (),
        *,
        benign: Sequence[Example] = (),
        anchors: Anchors = ANCHORS,
    ) -> None:
        if not safe:
            raise InvalidData("there are no safe examples to train on")
        self.examples, self.defense, self.seed, self.training_rows = safe, defense or Spard(), seed, rows
        self.benign, self.anchors = benign, anchors
        self.tau: dict[str, float] = {}
        self.metrics: list[Metrics] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Encode the safe rows, and measure tau or read it from the checkpoint that the trainer resumes from."""
        if args.world_size > 1:
            raise InvalidRecipe("SpardCallback works in one process; safe losses are not averaged over ranks")
        model, tokenizer = kwargs["model"], kwargs["processing_class"]
        self.theta = [part for part in model.parameters() if part.requires_grad]
        self.safety = safety_half(self.defense, state.max_steps)
        self.penalty = 0.0
        if state.global_step:
            self._restore(Path(args.output_dir) / f"checkpoint-{state.global_step}" / _FOLDER, model, tokenizer)
        else:
            self.safe = self._safe_rows(self.defense, model, tokenizer)
            self.tau = self.safe.tau()
            log.info("safe losses are held at %s", self.tau)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the anchor's gradient to the task's, which the trainer has already clipped."""
        self.penalty = self.safe.add_anchor_(self.theta)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the safety step; the optimizer has already used `.grad`."""
        constraint = make_constraint(self.defense, self.tau)
        with self.safe.without_dropout():
            found = self.safety(self.theta, lambda: self.safe.losses(self.theta), kwargs["optimizer"], constraint)
        self.metrics.append({"loss/anchor": self.penalty} | found if self.safe.defense.anchor else found)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save tau, moments, and the state of the safe rows beside the trainer's checkpoint."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        tensors = self.safety.state() | {f"{_ROWS}{name}": part for name, part in self.safe.tensors().items()}
        save(folder / _FOLDER, state.global_step, tensors, {"tau": self.tau} | self.safe.place())

    def _restore(self, folder: Path, model: Any, tokenizer: Any) -> None:
        found = next(newest_first(folder), None)
        if found is None:
            raise InvalidRecipe(f"{folder} is not there; without it a resumed run does not know its tau")
        tensors, state = load(found)
        own = {name.removeprefix(_ROWS): part for name, part in tensors.items() if name.startswith(_ROWS)}
        bare = replace(self.defense, anchor_weight=0.0, augment=())  # for checkpoints of runs without them
        self.safe = self._safe_rows(self.defense if "anchored" in state else bare, model, tokenizer)
        drawn, anchored = state["drawn"], state.get("anchored", 0)
        pairs, replies = state.get("pairs"), state.get("replies")
        self.safe.restore(own, {"drawn": drawn, "anchored": anchored, "pairs": pairs, "replies": replies})
        self.tau = state["tau"]
        # One file holds both: names with the prefix `rows/` belong to the safe rows, all others to the optimizer step.
        self.safety.restore(self.theta, {name: part for name, part in tensors.items() if not name.startswith(_ROWS)})

    def _safe_rows(self, defense: Spard, model: Any, tokenizer: Any) -> SafeRows:
        if tokenizer is None:
            raise InvalidRecipe("SpardCallback needs the model's tokenizer: Trainer(..., processing_class=tokenizer)")
        rows, benign, anchors = self.training_rows, self.benign, self.anchors
        return SafeRows(model, tokenizer, self.examples, rows, defense, self.seed, benign=benign, anchors=anchors)
