"""The training loop: same base model, data and recipe, same adapter.

Everything random is a function of the recipe's seed and the step: the order of the rows, the safe batch, LoRA's
start and its dropout. So nothing but the parameters, the optimizer and the step number has to be kept to resume a run
bit for bit, and the global random state is left as it was found.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy.random import SeedSequence
from torch import Tensor
from torch.optim import AdamW

from spard.checkpoint import Saved, load, newest_first, save
from spard.config import Audit, Recipe, Resolved, Spard
from spard.data import Batch, Encoded, batches, collate, order
from spard.errors import InvalidData, Stopped
from spard.grads import Gradient, Loss, safe_losses, utility_gradient
from spard.lora import dropping_modules, stop_gradient_checkpointing, trainable_model
from spard.losses import evaluate
from spard.methods import step_of
from spard.methods.base import Metrics
from spard.models import Base
from spard.vectors import Vector, size

log = logging.getLogger(__name__)

SAFE_STREAM = 2  # the safe rows have an order of their own, apart from the streams of `batches`


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained model, a `PeftModel` or the whole one, and what each step reported."""

    model: Any = field(repr=False)
    steps: int
    trained_tokens: int
    seconds: float
    tau: dict[str, float]
    metrics: list[Metrics] = field(repr=False)


def schedule(step: int, total: int, warmup_ratio: float) -> float:
    """The share of the peak learning rate at a step: linear warm-up, then linear decay towards 0."""
    warmup = math.ceil(warmup_ratio * total)
    return (step + 1) / warmup if step < warmup else (total - step) / (total - warmup)


def safe_rows(seed: int, step: int, n: int, size: int) -> list[int]:
    """The safe batch of a step, a function of (seed, step): the rows of one permutation after another, in order."""
    size = min(size, n)
    drawn = [divmod(step * size + i, n) for i in range(size)]
    epochs = {epoch: order(seed, epoch, n, SAFE_STREAM) for epoch, _ in drawn}
    return [epochs[epoch][i] for epoch, i in drawn]


def train(
    base: Base,
    task: Sequence[Encoded],
    safe: Sequence[Encoded],
    recipe: Recipe,
    resolved: Resolved,
    *,
    on_step: Callable[[int, int, Metrics], None] | None = None,
    checkpoints: Path | None = None,
    on_checkpoint: Callable[[Saved, Metrics], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Trained:
    """Fine-tune `base` on `task` while the recipe's defence watches `safe`; `base.model` is changed in place.

    Resumes from the newest valid checkpoint of the same run in `checkpoints`. When `should_stop` says so after a step,
    the run is checkpointed and `Stopped` is raised. `on_step` gets the step, their total and the step's metrics.
    """
    with torch.random.fork_rng(devices=[base.device] if base.device.type == "cuda" else []):
        run = _Run(base, task, safe, recipe, resolved)
        run.start(checkpoints)
        saved_at = time.monotonic()
        while run.progress.step < run.total_steps:
            metrics = run.step()
            if on_step:
                on_step(run.progress.step, run.total_steps, metrics)
            stop = should_stop is not None and should_stop()
            if checkpoints and (stop or time.monotonic() - saved_at >= recipe.checkpoint_every_s):
                saved = run.save(checkpoints)
                saved_at = time.monotonic()
                if on_checkpoint:
                    on_checkpoint(saved, metrics)
            if stop:
                raise Stopped(f"stopped after step {run.progress.step} of {run.total_steps}")
        return run.finish()


@dataclass(slots=True)
class _Progress:
    """What is saved beside parameters and optimizer."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    tau: dict[str, float] = field(default_factory=dict)
    metrics: list[Metrics] = field(default_factory=list)


class _Run:
    """One run: the model, its optimizer and how far it has come."""

    def __init__(
        self, base: Base, task: Sequence[Encoded], safe: Sequence[Encoded], recipe: Recipe, resolved: Resolved
    ) -> None:
        if not task or (isinstance(recipe.defense, Spard) and not safe):
            raise InvalidData(f"there are no {'safe examples' if task else 'rows'} to train on")
        self.base, self.task, self.safe, self.recipe, self.resolved = base, task, safe, recipe, resolved
        self.safe_batch_size = recipe.defense.safe_batch_size if isinstance(recipe.defense, Spard) else 0
        self.dtype = base.model.dtype
        self.model = trainable_model(base.model, recipe)
        self.dropping = dropping_modules(self.model)
        self.theta = {name: part for name, part in base.model.named_parameters() if part.requires_grad}
        self.optimizer = AdamW(
            self.theta.values(), lr=resolved.learning_rate, weight_decay=recipe.weight_decay, fused=True
        )
        self.lengths = [len(row.ids) for row in task]
        self.steps_per_epoch = math.ceil(len(task) / resolved.batch_size)
        self.total_steps = self.steps_per_epoch * resolved.n_epochs
        self.epoch: tuple[int, list[list[int]]] = (-1, [])
        self.progress = _Progress()

    def start(self, checkpoints: Path | None) -> None:
        """Go on from a checkpoint of this very run, or measure tau at the base model and begin."""
        if not (checkpoints and self._restore(checkpoints)) and isinstance(self.recipe.defense, Spard):
            self.progress.tau = self._measure_tau(self.recipe.defense)
        self.method = step_of(self.recipe.defense, self.progress.tau)
        n = size(list(self.theta.values()))
        log.info("training %d parameters, steps %d to %d", n, self.progress.step + 1, self.total_steps)

    def step(self) -> Metrics:
        """One iteration of the method; its dropout masks depend on (seed, step) only."""
        started, progress = time.perf_counter(), self.progress
        rate = self.resolved.learning_rate * schedule(progress.step, self.total_steps, self.recipe.warmup_ratio)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        torch.manual_seed(int(SeedSequence([self.recipe.seed, progress.step]).generate_state(1)[0]))
        rows, theta = self._rows(progress.step), list(self.theta.values())
        metrics = self.method(theta, partial(self._utility, theta, rows), partial(self._safe, theta), self.optimizer)

        seconds, tokens = time.perf_counter() - started, sum(self.lengths[row] for row in rows)
        progress.step += 1
        progress.tokens += tokens
        progress.seconds += seconds
        metrics |= {"lr": rate, "tokens_per_s": tokens / seconds}
        progress.metrics.append(metrics)
        return metrics

    def save(self, checkpoints: Path) -> Saved:
        """Checkpoint parameters, optimizer state and progress."""
        tensors: dict[str, Tensor] = {f"theta/{name}": part for name, part in self.theta.items()}
        for name, part in self.theta.items():
            tensors |= {f"{key}/{name}": value for key, value in self.optimizer.state[part].items()}
        return save(checkpoints, self.progress.step, tensors, {"run": self._identity(), **asdict(self.progress)})

    def finish(self) -> Trained:
        """The model as it is served: no dropout, no checkpointing, in the base model's own precision."""
        if self.recipe.gradient_checkpointing:
            stop_gradient_checkpointing(self.base.model)
        if self.recipe.lora is None:
            self.base.model.to(self.dtype)
        done = self.progress
        return Trained(self.model.eval(), done.step, done.tokens, done.seconds, done.tau, done.metrics)

    def _restore(self, checkpoints: Path) -> bool:
        for path in newest_first(checkpoints):
            tensors, state = load(path)
            if state.pop("run") != self._identity():
                log.warning("checkpoint %s belongs to another run; it is left alone", path.name)
                continue
            with torch.no_grad():
                for name, part in self.theta.items():
                    part.copy_(tensors[f"theta/{name}"])
                    moments = {key: tensors[f"{key}/{name}"] for key in ("step", "exp_avg", "exp_avg_sq")}
                    self.optimizer.state[part] = {key: value.to(part.device) for key, value in moments.items()}
            self.progress = _Progress(**state)
            return True
        return False

    def _identity(self) -> str:
        """A digest of everything that decides the numbers of this run."""
        recipe = asdict(replace(self.recipe, audit=Audit(), checkpoint_every_s=1.0))
        rows = [(row.ids, row.labels) for row in (*self.task, *self.safe)]
        facts = json.dumps([self.base.digest, recipe, asdict(self.resolved), rows])
        return hashlib.sha256(facts.encode()).hexdigest()

    def _measure_tau(self, defense: Spard) -> dict[str, float]:
        """tau for each constrained loss: as asked, or the model's own on the whole safe set before the first step."""
        names = ("mean", "prefix") if defense.constraint == "both" else (defense.constraint,)
        if defense.tau != "auto":
            return dict.fromkeys(names, defense.tau)
        found = evaluate(self.base.model, self.safe, self.base.tokenizer.pad_token_id)
        own = {"mean": found.loss, "prefix": found.prefix_loss}
        return {name: own[name] for name in names}

    def _rows(self, step: int) -> list[int]:
        number, i = divmod(step, self.steps_per_epoch)
        if self.epoch[0] != number:
            self.epoch = number, batches(self.recipe.seed, number, self.lengths, self.resolved.batch_size)
        return self.epoch[1][i]

    def _utility(self, theta: Vector, rows: Sequence[int]) -> Gradient:
        self._set_dropout(True)
        piece = self.recipe.micro_batch_size or len(rows)
        pieces = [self._batch([self.task[row] for row in rows[i : i + piece]]) for i in range(0, len(rows), piece)]
        return utility_gradient(self.base.model, theta, pieces, self.recipe.max_grad_norm)

    def _safe(self, theta: Vector) -> dict[str, Loss]:
        """The safe losses on this step's safe rows, without dropout."""
        rows = safe_rows(self.recipe.seed, self.progress.step, len(self.safe), self.safe_batch_size)
        self._set_dropout(False)
        return safe_losses(self.base.model, theta, self._batch([self.safe[row] for row in rows]))

    def _set_dropout(self, on: bool) -> None:
        """A mode, not a context: gradient checkpointing runs the forward pass again inside the backward pass."""
        for module in self.dropping:
            module.training = on

    def _batch(self, rows: Sequence[Encoded]) -> Batch:
        return collate(rows, self.base.tokenizer.pad_token_id, self.base.device)
