"""One run of the training loop: model, optimizer and progress, with its steps, resume states and result."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from numpy.random import SeedSequence
from torch import Tensor

from spard import distributed
from spard.config import Recipe, Resolved
from spard.config.anchors import Kind
from spard.data.batches import batches
from spard.data.chat import Encoded
from spard.errors import InvalidData
from spard.losses.anchor import Pair
from spard.losses.cross_entropy import evaluate
from spard.losses.gradients import Loss
from spard.losses.vectors import Vector, size
from spard.methods import open_method
from spard.methods.base import Metrics, Plan
from spard.models.base import Base, disable_adapters
from spard.models.lora import load_adapter_, stop_gradient_checkpointing, trainable_model
from spard.models.sharding import Shards, is_sharded, retype_, shard_
from spard.training.best import Best, Ended
from spard.training.ema import Ema
from spard.training.energy import EnergyMeter
from spard.training.identity import Identity
from spard.training.layout import METHOD, Layout
from spard.training.objective import Objective
from spard.training.operations import OperationCounter
from spard.training.optimizers import open_optimizer, parameter_state, restore_
from spard.training.recent import RecentWeights
from spard.training.references import References, evaluate_validation
from spard.training.resume_state import Saved, load, newest_first, save, save_together, strip_prefix
from spard.training.schedules import safe_rows, schedule
from spard.training.trained import Compute, Progress, Trained

log = logging.getLogger(__name__)

VALIDATIONS = 20  # validations in a run, each on one batch
_EMA = "ema/"
_REFERENCE = "reference/"


class Run:
    """One training run; `train` calls `start`, then `step` until the end, then `finish`."""

    def __init__(
        self,
        base: Base,
        task: Sequence[Encoded],
        safe: Sequence[Encoded],
        recipe: Recipe,
        resolved: Resolved,
        start_from: Path | None,
        pairs: Mapping[Kind, Sequence[Pair]] | None = None,
        validation: Sequence[Encoded] = (),
        recent_epochs: int = 0,
    ) -> None:
        if not task or (recipe.uses_pool and not safe):
            raise InvalidData(f"there are no {'safe examples' if task else 'rows'} to train on")
        self.base, self.recipe, self.resolved, self.dtype = base, recipe, resolved, base.model.dtype
        shard_(base.model, recipe.sharding, base.device)
        self.model = trainable_model(base.model, recipe)
        self.started_from = load_adapter_(self.model, base, recipe, start_from) if start_from else None
        self.method = open_method(recipe.defense)
        self.pairs, self.progress, self.energy = pairs or {}, Progress(), EnergyMeter()
        self.counter = OperationCounter(base.model, checkpointing=recipe.gradient_checkpointing)
        with self._counting():
            self.objective = Objective(base, task, safe, recipe, resolved, self.method, self.pairs)
        trained = {name: part for name, part in base.model.named_parameters() if part.requires_grad}
        are_cut = is_sharded(base.model) and recipe.lora is None
        self.vector: Vector = Shards(list(trained.values())) if are_cut else list(trained.values())
        self.theta, self.layout = dict(zip(trained, self.vector, strict=True)), Layout(list(trained), self.vector)
        self.ema = Ema(self.theta, recipe.ema) if recipe.ema else None
        self.best = Best(recipe.ending, self.theta) if recipe.ending.compares else None
        self.recent = RecentWeights(self.theta, recent_epochs if recipe.lora else 0)
        self.optimizer = open_optimizer(recipe, self.theta.values(), resolved.learning_rate)
        self.validation, self.references = validation, None if recipe.dpo is None else References()
        self.lengths = [row.tokens for row in self.objective.task]
        self.customer_rows, self.steps_per_epoch = len(task), math.ceil(len(self.lengths) / resolved.batch_size)
        self.total_steps = self.steps_per_epoch * resolved.n_epochs
        self.epoch: tuple[int, list[list[int]]] = (-1, [])

    @property
    def epochs_done(self) -> int | None:
        """Number of finished epochs at an epoch end; None inside an epoch and before the first step."""
        epochs, inside = divmod(self.progress.step, self.steps_per_epoch)
        return epochs if epochs and not inside else None

    def start(self, resume_states: Path | None) -> None:
        """Continue from a resume state of this run; without one, measure tau and references and begin."""
        found = self._restore(resume_states) if resume_states else None
        if found is None:
            with self._counting():
                self.progress.tau = self._measure_tau()
                self._measure_references()
        if self.references:
            self.objective.set_reference(self.references.task_N2)
        # `restore` follows `start`, because it fills what `start` sets up.
        self.method.start(Plan(self.progress.tau, self.total_steps, self.recipe.max_grad_norm))
        if found:
            self.method.restore(self.vector, found)
        done, total = self.progress.step, self.total_steps
        log.info("training %d parameters, %d of %d steps are done", size(self.vector), done, total)

    def step(self) -> Metrics:
        """Take one step of the method and return its metrics; the random state depends on (seed, step, rank) only."""
        started, progress = time.perf_counter(), self.progress
        rate = self.resolved.learning_rate * schedule(progress.step, self.total_steps, self.recipe.warmup_ratio)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # Seeding every step makes dropout independent of where the run was resumed.
        entropy = [self.recipe.seed, progress.step, *distributed.seeds()]
        torch.manual_seed(int(SeedSequence(entropy).generate_state(1)[0]))
        rows, theta = self._rows(progress.step), self.vector
        task = partial(self.objective.task_gradient, theta, rows, self.objective.anchors(progress.step))
        with self._counting():
            metrics = self.method.step(theta, task, partial(self._safe, theta), self.optimizer)
        if self.ema:
            self.ema.update_()
        seconds = time.perf_counter() - started
        tokens = sum(self.lengths[row] for row in rows if row < self.customer_rows)
        # Only after the step succeeded: a failed one must not count as done in a resume state.
        progress.step += 1
        progress.tokens += tokens
        progress.seconds += seconds
        metrics |= {"lr": rate, "tokens_per_s": tokens / seconds}
        progress.metrics.append(metrics)
        return metrics

    def validate(self, metrics: Metrics) -> None:
        """Add the loss on a batch of the validation rows to a step's metrics, about twenty times in a run.

        Consecutive batches go through the rows in order. No random number is drawn and no weight changes.
        """
        every, rows = max(1, self.total_steps // VALIDATIONS), self.validation
        if rows and self.progress.step % every == 0:
            count = min(self.resolved.batch_size, len(rows))
            first = self.progress.step // every * count
            places = [(first + i) % len(rows) for i in range(count)]
            found = evaluate_validation(self.base, rows, self.recipe, self.references, places)
            metrics |= {"loss/valid": found.loss, "accuracy/valid": found.accuracy}

    def save(self, resume_states: Path) -> Saved | None:
        """Save parameters, optimizer state and progress; if the parameters are sharded, all ranks must call this."""
        tensors: dict[str, Tensor] = {f"theta/{name}": part for name, part in self.theta.items()}
        for name, part in self.theta.items():
            tensors |= {f"{key}/{name}": value for key, value in parameter_state(self.optimizer, part).items()}
        tensors |= {f"{METHOD}{name}": value for name, value in self.method.state().items()}
        if self.ema:
            tensors |= {f"{_EMA}{name}": part for name, part in self.ema.mean.items()}
        if self.references:
            tensors |= {f"{_REFERENCE}{name}": part for name, part in self.references.state().items()}
        self.recent.save(tensors)
        step, state = self.progress.step, {"run": self._identity.digest, **asdict(self.progress)}
        state |= self.best.save(tensors) if self.best else {}
        if not self.layout.is_cut:
            return save(resume_states, step, tensors, state)
        joined = {name: self.layout.join_tensor(name, tensor) for name, tensor in tensors.items()}
        return save_together(resume_states, step, joined, state)

    @contextmanager
    def as_finished(self, step: int | None = None) -> Iterator[Any]:
        """Yield the model as it would be served if the run ended now, then restore the weights exactly.

        step  use the weights of an earlier epoch end, stored in `self.recent`.

        Meant for adapters: a copy of every trained weight is held meanwhile.
        """
        kept = {name: part.detach().clone() for name, part in self.theta.items()}
        try:
            self._release_() if step is None else self.recent.put_(step)
            yield self.model.eval()
        finally:
            with torch.no_grad():
                for name, part in self.theta.items():
                    part.copy_(kept[name])
            self.model.train()

    def finish(self, ended: Ended | None = None) -> Trained:
        """Return the model as it is served: without dropout and checkpointing, in the base model's own precision.

        `ended` is the result of `Ends.close`, stored in the result.
        """
        if not (self.best and self.best.release_()):
            self._release_()
        if self.recipe.gradient_checkpointing:
            stop_gradient_checkpointing(self.base.model)
        if self.recipe.lora is None:
            retype_(self.base.model, self.dtype)
        done = self.progress
        numbers = done.step, done.tokens, done.seconds, done.tau, done.metrics
        passes = done.operations, done.forward_tokens, done.backward_tokens
        compute = Compute(*passes, done.energy_j, tuple(self.energy.missing))
        return Trained(self.model.eval(), *numbers, references=self.references, ended=ended, compute=compute)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Add the operations of the passes inside the block, summed over the ranks, and the energy that it took.

        All ranks have to come here together.
        """
        counter = self.counter
        self.energy.consumed_joules()  # of what was between: audits at the ends of epochs, for example
        before = counter.operations, counter.forward_tokens, counter.backward_tokens
        with counter.counting():
            yield
        after = counter.operations, counter.forward_tokens, counter.backward_tokens
        own = [now - then for now, then in zip(after, before, strict=True)]
        self.progress.add_compute(*distributed.sum_counts(own, self.base.device))
        self.progress.add_energy(self.energy.consumed_joules())

    def _release_(self) -> None:
        """Turn the trained weights into the served ones: the moving average, if any, and the method's own change."""
        if self.ema:
            self.ema.release_()
        self.method.finish_(self.base.model)

    def _restore(self, resume_states: Path) -> dict[str, Tensor] | None:
        """Restore parameters, moments and progress.

        Return the method's tensors, or None without a resume state of this run.
        """
        for path in newest_first(resume_states):
            tensors, state = load(path, self.layout.empty)
            if not self._identity.matches(state.pop("run")):
                log.warning("resume state %s belongs to another run; it is left alone", path.name)
                continue
            with torch.no_grad():
                for name, part in self.theta.items():
                    part.copy_(tensors[f"theta/{name}"])
                restore_(self.optimizer, self.theta, tensors)
            if self.ema:
                self.ema.restore(strip_prefix(_EMA, tensors))
            if self.references:
                self.references = References(**strip_prefix(_REFERENCE, tensors))
            if self.best:
                self.best.restore(state, tensors)
            self.recent.restore(tensors)
            state.setdefault("operations", None)  # of a version that did not count them
            self.progress = Progress(**state)
            return strip_prefix(METHOD, tensors)
        return None

    @cached_property
    def _identity(self) -> Identity:
        held = self.validation if self.references or self.best else ()
        facts = self.objective.task, self.objective.safe, self.pairs, held
        return Identity(self.base.digest, self.recipe, self.resolved, self.started_from, *facts)

    def _measure_tau(self) -> dict[str, float]:
        pad_id = self.base.tokenizer.pad_token_id
        with disable_adapters(self.base.model):
            tau = self.method.measure_tau(lambda: evaluate(self.base.model, self.objective.plain, pad_id))
            self.method.measure_rows(self.objective.base_losses)
        return distributed.broadcast_scalars(tau, self.base.device) if tau else tau

    def _measure_references(self) -> None:
        """Compute the reference log-probabilities of pairs with the model before training.

        That is the base model, or the adapter that the run starts from.
        """
        if self.references:
            # Unlike for tau, an adapter to start from stays on: DPO measures change from where the training begins.
            with nullcontext() if self.started_from else disable_adapters(self.base.model):
                self.references = References.from_base(self.base, self.objective.task, self.validation)

    def _rows(self, step: int) -> list[int]:
        number, i = divmod(step, self.steps_per_epoch)
        if self.epoch[0] != number:
            self.epoch = number, batches(self.recipe.seed, number, self.lengths, self.resolved.batch_size)
        return self.epoch[1][i]

    def _safe(self, theta: Vector) -> Mapping[str, Loss]:
        """Return the safe losses on the next safe batch."""
        n, size = len(self.objective.safe), self.method.safe_batch_size(self.resolved.batch_size)
        rows = safe_rows(self.recipe.seed, self.progress.safe_batches, n, size)
        self.progress.safe_batches += 1
        return self.objective.safe_losses(theta, rows)
