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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy.random import SeedSequence
from torch import Tensor
from torch.optim import AdamW

from spard import ranks
from spard.anchor import ANCHORS
from spard.checkpoint import Saved, load, newest_first, save
from spard.config import Audit, Recipe, Resolved, SafeLora, Spard
from spard.data import Encoded, batches
from spard.ema import Ema
from spard.errors import InvalidData, Stopped
from spard.grads import Loss
from spard.lora import go_on_from_, stop_gradient_checkpointing, trainable_model
from spard.losses import evaluate
from spard.methods import Stateful, step_of
from spard.methods.base import Metrics
from spard.models import Base, adapters_off
from spard.objective import Objective, safe_batch_size
from spard.realign import Realignment
from spard.schedules import safe_rows, schedule
from spard.tau import base_tau
from spard.vectors import Vector, size

log = logging.getLogger(__name__)

_METHOD = "method/"  # tensors of a checkpoint that are the method's own
_EMA = "ema/"


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained model, a `PeftModel` or the whole one, and what each step reported."""

    model: Any = field(repr=False)
    steps: int
    trained_tokens: int
    seconds: float
    tau: dict[str, float]
    metrics: list[Metrics] = field(repr=False)


def train(
    base: Base,
    task: Sequence[Encoded],
    safe: Sequence[Encoded],
    recipe: Recipe,
    resolved: Resolved,
    *,
    on_step: Callable[[int, int, Metrics], None] | None = None,
    start_from: Path | None = None,
    checkpoints: Path | None = None,
    on_checkpoint: Callable[[Saved, Metrics], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Trained:
    """Fine-tune `base` on `task` while the recipe's defence watches `safe`; `base.model` is changed in place.

    `start_from` is the folder of an adapter whose weights come first; tau and every other reference stay the base
    model's, so that jobs on top of each other drift no further than one. Resumes from the newest valid checkpoint of
    the same run in `checkpoints`. When `should_stop` says so after a step, the run is checkpointed and `Stopped` is
    raised. `on_step` gets the step, their total and the step's metrics.
    """
    with torch.random.fork_rng(devices=[base.device] if base.device.type == "cuda" else []):
        run = _Run(base, task, safe, recipe, resolved, start_from)
        run.start(checkpoints)
        saved_at = time.monotonic()
        while run.progress.step < run.total_steps:
            metrics = run.step()
            if on_step:
                on_step(run.progress.step, run.total_steps, metrics)
            stop = ranks.agreed(should_stop is not None and should_stop(), base.device)
            if checkpoints and ranks.own() == 0 and (stop or time.monotonic() - saved_at >= recipe.checkpoint_every_s):
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
    safe_batches: int = 0
    seconds: float = 0.0
    tau: dict[str, float] = field(default_factory=dict)
    metrics: list[Metrics] = field(default_factory=list)


class _Run:
    """One run: the model, its optimizer and how far it has come."""

    def __init__(
        self,
        base: Base,
        task: Sequence[Encoded],
        safe: Sequence[Encoded],
        recipe: Recipe,
        resolved: Resolved,
        start_from: Path | None,
    ) -> None:
        if not task or (recipe.uses_pool and not safe):
            raise InvalidData(f"there are no {'safe examples' if task else 'rows'} to train on")
        self.base, self.recipe, self.resolved, defense = base, recipe, resolved, recipe.defense
        self.dtype, has_lora = base.model.dtype, recipe.lora is not None
        self.model = trainable_model(base.model, recipe)
        self.started_from = go_on_from_(self.model, base, recipe, start_from) if start_from else None
        self.objective = Objective(base, task, safe, recipe)
        self.realignment = Realignment(base, defense, has_lora=has_lora) if isinstance(defense, SafeLora) else None
        self.safe_batch_size = safe_batch_size(defense, resolved.batch_size)
        self.theta = {name: part for name, part in base.model.named_parameters() if part.requires_grad}
        self.ema = Ema(self.theta, recipe.ema) if recipe.ema else None
        self.optimizer = AdamW(
            self.theta.values(), lr=resolved.learning_rate, weight_decay=recipe.weight_decay, fused=True
        )
        self.lengths = [len(row.ids) for row in self.objective.task]
        self.customer_rows, self.steps_per_epoch = len(task), math.ceil(len(self.lengths) / resolved.batch_size)
        self.total_steps = self.steps_per_epoch * resolved.n_epochs
        self.epoch: tuple[int, list[list[int]]] = (-1, [])
        self.progress = _Progress()

    def start(self, checkpoints: Path | None) -> None:
        """Go on from a checkpoint of this very run, or measure tau at the base model and begin."""
        found = self._restore(checkpoints) if checkpoints else None
        if found is None and isinstance(self.recipe.defense, Spard):
            self.progress.tau = self._measure_tau(self.recipe.defense)
        tau, max_norm = self.progress.tau, self.recipe.max_grad_norm
        self.method = step_of(self.recipe.defense, tau, self.total_steps, max_norm)
        if found and isinstance(self.method, Stateful):
            self.method.restore(list(self.theta.values()), found)
        steps = self.progress.step + 1, self.total_steps
        log.info("training %d parameters, steps %d to %d", size(list(self.theta.values())), *steps)

    def step(self) -> Metrics:
        """One iteration of the method; its dropout masks depend on (seed, step) only."""
        started, progress = time.perf_counter(), self.progress
        rate = self.resolved.learning_rate * schedule(progress.step, self.total_steps, self.recipe.warmup_ratio)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        torch.manual_seed(int(SeedSequence([self.recipe.seed, progress.step, *ranks.seeds()]).generate_state(1)[0]))
        rows, theta = self._rows(progress.step), list(self.theta.values())
        anchors = safe_rows(self.recipe.seed, progress.step, len(self.objective.plain), ANCHORS)
        task = partial(self.objective.task_gradient, theta, rows, anchors)
        metrics = self.method(theta, task, partial(self._safe, theta), self.optimizer)
        if self.ema:
            self.ema.update_()
        seconds = time.perf_counter() - started
        tokens = sum(self.lengths[row] for row in rows if row < self.customer_rows)
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
        if isinstance(self.method, Stateful):
            tensors |= {f"{_METHOD}{name}": value for name, value in self.method.state().items()}
        if self.ema:
            tensors |= {f"{_EMA}{name}": part for name, part in self.ema.mean.items()}
        return save(checkpoints, self.progress.step, tensors, {"run": self._identity(), **asdict(self.progress)})

    def finish(self) -> Trained:
        """The model as it is served: no dropout, no checkpointing, in the base model's own precision."""
        if self.ema:
            self.ema.release_()
        if self.realignment:
            self.realignment.finish_(self.base.model)
        if self.recipe.gradient_checkpointing:
            stop_gradient_checkpointing(self.base.model)
        if self.recipe.lora is None:
            self.base.model.to(self.dtype)
        done = self.progress
        return Trained(self.model.eval(), done.step, done.tokens, done.seconds, done.tau, done.metrics)

    def _restore(self, checkpoints: Path) -> dict[str, Tensor] | None:
        """Put parameters, moments and progress back; the method's own tensors, none without a checkpoint."""
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
            if self.ema:
                self.ema.restore(_under(_EMA, tensors))
            self.progress = _Progress(**state)
            return _under(_METHOD, tensors)
        return None

    def _identity(self) -> str:
        """A digest of everything that decides the numbers of this run; how a batch is cut only rounds them."""
        recipe = asdict(replace(self.recipe, audit=Audit(), checkpoint_every_s=1.0, micro_batch_size=None))
        rows = [(row.ids, row.labels) for row in (*self.objective.task, *self.objective.safe)]
        facts = [self.base.digest, recipe, asdict(self.resolved), rows, *filter(None, [self.started_from])]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def _measure_tau(self, defense: Spard) -> dict[str, float]:
        pad_id = self.base.tokenizer.pad_token_id
        with adapters_off(self.base.model):
            tau = base_tau(defense, lambda: evaluate(self.base.model, self.objective.plain, pad_id))
        return ranks.first_s(tau, self.base.device)

    def _rows(self, step: int) -> list[int]:
        number, i = divmod(step, self.steps_per_epoch)
        if self.epoch[0] != number:
            self.epoch = number, batches(self.recipe.seed, number, self.lengths, self.resolved.batch_size)
        return self.epoch[1][i]

    def _safe(self, theta: Vector) -> dict[str, Loss]:
        """The safe losses on the next safe batch."""
        safe = self.objective.safe
        rows = safe_rows(self.recipe.seed, self.progress.safe_batches, len(safe), self.safe_batch_size)
        self.progress.safe_batches += 1
        return self.objective.safe_losses(theta, rows)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): part for name, part in tensors.items() if name.startswith(prefix)}
