"""The training loop; the same base model, data and recipe give the same adapter.

Everything random is a function of the recipe's seed and the step: the order of the rows, the safe batches, LoRA's
initialization and its dropout. A run can therefore be resumed bit for bit from parameters, optimizer state, method
state and the step number, and the global random state is restored afterward.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from numpy.random import SeedSequence
from torch import Tensor

from spard import distributed
from spard.config import Recipe, ResolvedNumbers
from spard.config.anchors import Kind
from spard.data.batches import batches
from spard.data.chat import EncodedSample
from spard.errors import InvalidData, NonFiniteLoss, Stopped
from spard.losses.anchor import Pair
from spard.losses.gradients import Loss
from spard.losses.vectors import Vector, size
from spard.methods import open_method
from spard.methods.base import Metrics, Plan
from spard.models.base import Base, disable_adapters
from spard.models.budget import Report, name_work
from spard.models.lora import load_adapter_, stop_gradient_checkpointing, trainable_model
from spard.models.sharding import Shards, is_sharded, retype_, shard_
from spard.training import epoch_ends
from spard.training.compute import Compute, EnergyMeter, OperationCounter
from spard.training.epoch_ends import Best, EpochCallback, EpochChoice, EpochEvaluator, EpochResult, References
from spard.training.epoch_ends import EpochEnd as EpochEnd
from spard.training.objective import Objective, safe_rows, schedule
from spard.training.optimizers import open_optimizer, parameter_state, restore_
from spard.training.resume_state import SavedState, load, newest_first, save, save_together, strip_prefix
from spard.training.run import METHOD, Ema, Identity, Layout, Progress, RecentWeights
from spard.training.run import Hooks as Hooks
from spard.training.run import TrainedModel as TrainedModel

log = logging.getLogger(__name__)

VALIDATIONS = 20  # validations in a run, each on one batch
_EMA = "ema/"
_REFERENCE = "reference/"


def train(
    base: Base,
    task: Sequence[EncodedSample],
    safe: Sequence[EncodedSample],
    recipe: Recipe,
    resolved: ResolvedNumbers,
    *,
    on_step: Callable[[int, int, Metrics], None] | None = None,
    start_from: Path | None = None,
    resume_states: Path | None = None,
    on_saved: Callable[[SavedState, Metrics], None] | None = None,
    on_epoch: EpochCallback | None = None,
    compare: EpochEvaluator | None = None,
    validation: Sequence[EncodedSample] = (),
    should_stop: Callable[[], bool] | None = None,
    pairs: Mapping[Kind, Sequence[Pair]] | None = None,
    kept_ends: int | None = None,
    shows_last: Callable[[], bool] | None = None,
    shuffle: bool = True,
    on_work: Report | None = None,
) -> TrainedModel:
    """Fine-tune `base` on `task` with the recipe's defense on the safe rows `safe`; `base.model` is changed in place.

    on_step        called after each step with its number, their total and the metrics, at times with validation losses.
    start_from     folder of an adapter to start from. tau and other references stay the base model's, so that a chain
                   of jobs drifts no further from it than a single job.
    resume_states  folder to save resume states in; the run continues from the newest valid one of its own there.
    on_saved       called after each save with the resume state and the last step's metrics.
    on_epoch       called with the model of an adapter at the end of every epoch but the last; at the last too if the
                   run releases another epoch. Must not change weights; called on every rank.
    compare        called at the end of every epoch if the recipe compares epochs; returns its standing, of which rank
                   0's counts for all ranks. Must not change weights.
    validation     rows for validation losses.
    should_stop    asked after each step; if True, the state is saved and `Stopped` raised.
    pairs          prompt pairs by kind that the anchor holds besides the prompts of `safe`.
    kept_ends      number of checkpoints that the caller keeps, including the result; None: all.
    shows_last     asked at a stop; if True, `on_epoch` gets the last epoch ends again, now as kept.
    shuffle        False: each batch is the next rows of `task`, as they come.
    on_work        gets the progress of what is computed before the first step, and of validations.

    Raises `Stopped`, and `NonFiniteLoss` if the training diverges; `on_epoch` gets the last epoch ends again before
    that.
    """
    hooks = Hooks(on_step, on_saved, on_epoch, compare, should_stop, shows_last, kept_ends, on_work)
    # First, so that the caller's random state returns whatever is drawn below.
    with torch.random.fork_rng([base.device] if base.device.type == "cuda" else []):
        trainer = Trainer(
            base, task, safe, recipe, resolved, start_from, pairs, validation, hooks, resume_states, shuffle=shuffle
        )
        with closing(trainer.counter), distributed.in_parts(trainer.parts):
            return trainer.run()


class Trainer:
    """One training run: its model, rows, optimizer, budget of steps and progress."""

    def __init__(
        self,
        base: Base,
        task: Sequence[EncodedSample],
        safe: Sequence[EncodedSample],
        recipe: Recipe,
        resolved: ResolvedNumbers,
        start_from: Path | None = None,
        pairs: Mapping[Kind, Sequence[Pair]] | None = None,
        validation: Sequence[EncodedSample] = (),
        hooks: Hooks | None = None,
        resume_states: Path | None = None,
        shuffle: bool = True,
    ) -> None:
        if not task or (recipe.uses_pool and not safe):
            raise InvalidData(f"there are no {'safe examples' if task else 'rows'} to train on")
        self.hooks = hooks or Hooks()
        self.base, self.recipe, self.resolved, self.dtype = base, recipe, resolved, base.model.dtype
        shard_(base.model, recipe.sharding, base.device)
        self.model = trainable_model(base.model, recipe)
        self.started_from = load_adapter_(self.model, base, recipe, start_from) if start_from else None
        self.method = open_method(recipe.defense)
        self.pairs, self.progress, self.energy = pairs or {}, Progress(), EnergyMeter()
        self.counter = OperationCounter(base.model, checkpointing=recipe.gradient_checkpointing)
        with self._counting():
            work = self.hooks.on_work
            self.objective = Objective(base, task, safe, recipe, resolved, self.method, self.pairs, work)
        trained = {name: part for name, part in base.model.named_parameters() if part.requires_grad}
        are_cut = is_sharded(base.model) and recipe.lora is None
        self.vector: Vector = Shards(list(trained.values())) if are_cut else list(trained.values())
        self.theta, self.layout = dict(zip(trained, self.vector, strict=True)), Layout(list(trained), self.vector)
        self.ema = Ema(self.theta, recipe.ema) if recipe.ema else None
        self.best = Best(recipe.ending, self.theta) if recipe.ending.compares else None
        self.recent = RecentWeights(self.theta, max(0, (self.hooks.kept_ends or 0) - 1) if recipe.lora else 0)
        self.optimizer = open_optimizer(recipe, self.theta.values(), resolved.learning_rate)
        self.validation, self.references = validation, None if recipe.dpo is None else References()
        self.lengths = [row.tokens for row in self.objective.task]
        self.customer_rows, self.steps_per_epoch = len(task), math.ceil(len(self.lengths) / resolved.batch_size)
        self.total_steps = self.steps_per_epoch * resolved.n_epochs
        self.epoch: tuple[int, list[list[int]]] = (-1, [])
        self.resume_states, self.shuffle, self.saved_at = resume_states, shuffle, time.monotonic()
        self.on_epoch = self.hooks.on_epoch if recipe.lora else None
        self.compare = self.hooks.compare if self.best else None

    def run(self) -> TrainedModel:
        """Train from the newest resume state to the end, and return the model as it is served."""
        self.start()
        # A run that continues at the end of an epoch was saved before that end was evaluated.
        self.evaluate_epoch_end()
        while not self.has_ended:
            metrics = self._next_step()
            self.validate(metrics)
            if self.hooks.on_step:
                self.hooks.on_step(self.progress.step, self.total_steps, metrics)
            is_stopped, is_due = self._agree()
            if is_due:
                self._save_and_report(metrics)
            if is_stopped:
                raise self._end_early()
            self.evaluate_epoch_end()
        return self.finish()

    @property
    def has_ended(self) -> bool:
        """True if all steps are done, or if early stopping has found that the epochs get no better."""
        gets_no_better = self.compare and self.best and self.best.standings and self.best.should_stop
        return self.progress.step >= self.total_steps or bool(gets_no_better)

    @property
    def epochs_done(self) -> int | None:
        """Number of finished epochs at an epoch end; None inside an epoch and before the first step."""
        epochs, inside = divmod(self.progress.step, self.steps_per_epoch)
        return epochs if epochs and not inside else None

    @property
    def parts(self) -> dist.ProcessGroup | None:
        """The process group over which the trained parameters are sharded; None if they are not."""
        return self.vector.group if isinstance(self.vector, Shards) else None

    def start(self) -> None:
        """Continue from a resume state of this run; without one, measure tau and references and begin."""
        found = self._restore(self.resume_states) if self.resume_states else None
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
        self.saved_at = time.monotonic()
        if self.hooks.on_work and done < total:
            self.hooks.on_work(f"taking step {done + 1:,} of {total:,}", 0, 0)

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

    def _next_step(self) -> Metrics:
        """Take a step; if its loss is not finite, report the last ends of epochs again before the error is raised."""
        try:
            return self.step()
        except NonFiniteLoss:
            self.show_again()
            raise

    def validate(self, metrics: Metrics) -> None:
        """Add the loss on a batch of the validation rows to a step's metrics, about twenty times in a run.

        Consecutive batches go through the rows in order. No random number is drawn and no weight changes.
        """
        every, rows = max(1, self.total_steps // VALIDATIONS), self.validation
        if rows and self.progress.step % every == 0:
            count = min(self.resolved.batch_size, len(rows))
            first = self.progress.step // every * count
            places = [(first + i) % len(rows) for i in range(count)]
            tell = name_work(self.hooks.on_work, "computing the loss on validation rows")
            found = epoch_ends.evaluate_validation(self.base, rows, self.recipe, self.references, places, tell)
            metrics |= {"loss/valid": found.loss, "accuracy/valid": found.accuracy}

    # Ends of epochs

    def evaluate_epoch_end(self) -> None:
        """Compare the end of an epoch and call `on_epoch`, if the last step was one.

        The end of the last epoch is the run's own result, which the caller evaluates: it is compared with the others,
        and `on_epoch` gets it only if the run releases another one.
        """
        epoch, is_last = self.epochs_done, self.progress.step == self.total_steps
        if epoch is None or not self._is_watched or (is_last and self.compare is None):
            return
        with self.as_finished() as model:
            end = self._end(epoch, model)
            if self.best and self.compare:
                self.best.add(EpochResult(**distributed.broadcast_object(asdict(self.compare(end)))))
            if not is_last or (self.best and self.best.released_standing.step != end.step):
                self._show(end)

    def show_again(self, without: int | None = None) -> None:
        """Call `on_epoch` again for the last epoch ends, latest first: a run that ends early keeps their checkpoints.

        `without` is the step of an epoch end to skip, because the run releases it.
        """
        for step in self.recent.steps if self.on_epoch else ():
            if step != without:
                with self.as_finished(step) as model:
                    end = self._end(step // self.steps_per_epoch, model, step)
                    self._call_on_epoch(replace(end, is_kept=True, is_shown_again=True))

    @property
    def _is_watched(self) -> bool:
        """True if a callback runs at the end of an epoch, which may take long."""
        return self.on_epoch is not None or self.compare is not None

    def _show(self, end: EpochEnd) -> None:
        """Call `on_epoch` for an epoch end, and store its weights if its checkpoint is not kept."""
        self.recent.forget_old(end.step, self.steps_per_epoch)
        if not end.is_kept:
            self.recent.add(end.step)
        self._call_on_epoch(end)

    def _call_on_epoch(self, end: EpochEnd) -> None:
        if self.on_epoch:
            self.on_epoch(end)

    def _end(self, epoch: int, model: Any, step: int | None = None) -> EpochEnd:
        step, kept = step or self.progress.step, self.hooks.kept_ends
        is_kept = kept is None or epoch > self.resolved.n_epochs - kept
        metrics = self.progress.metrics[step - 1]
        return EpochEnd(epoch, step, self.total_steps, metrics, model, self.references, is_kept)

    # Saving and stopping

    def _agree(self) -> tuple[bool, bool]:
        """Return if the run stops after this step, and if its state is saved; rank 0 decides for all.

        A rank that saved or stopped alone would leave the others waiting for its tensors.
        """
        stop = bool(self.hooks.should_stop and self.hooks.should_stop())
        agreed = distributed.broadcast_scalars({"stop": stop, "save": stop or self._is_due}, self.base.device)
        return bool(agreed["stop"]), bool(agreed["save"])

    @property
    def _is_due(self) -> bool:
        """True if the state is to be saved: at intervals, before long callbacks, and at the end of the training."""
        is_due = time.monotonic() - self.saved_at >= self.recipe.checkpoint_every_s
        is_end = self._is_watched and self.epochs_done is not None
        is_last = self.progress.step == self.total_steps  # a failure after training must not lose it
        return is_due or is_end or is_last

    def _save_and_report(self, metrics: Metrics) -> None:
        """Save a resume state; only rank 0 writes, unless the weights are sharded."""
        if self.resume_states is None or not (self.layout.is_cut or distributed.rank() == 0):
            return
        saved = self.save(self.resume_states)
        self.saved_at = time.monotonic()
        if saved and self.hooks.on_saved:
            self.hooks.on_saved(saved, metrics)

    def _end_early(self) -> Stopped:
        """Report the last ends of epochs again if `shows_last` asks for it; return the exception that ends the run."""
        distributed.wait_for_all()  # a rank that exits ends the others, which may still be saving
        if distributed.broadcast_object(bool(self.hooks.shows_last and self.hooks.shows_last())):
            self.show_again()
        return Stopped(f"stopped after step {self.progress.step} of {self.total_steps}")

    def save(self, resume_states: Path) -> SavedState | None:
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

    # The end of the run

    @contextmanager
    def as_finished(self, step: int | None = None) -> Iterator[Any]:
        """Yield the model in the form that is served at the end of a run, then restore the weights exactly.

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

    def finish(self) -> TrainedModel:
        """Return the model as it is served: without dropout and checkpointing, in the base model's own precision.

        If early stopping ended the run, `on_epoch` gets the last epoch ends again, now as kept.
        """
        ended = self._conclude_comparison()
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
        return TrainedModel(self.model.eval(), *numbers, references=self.references, ended=ended, compute=compute)

    def _conclude_comparison(self) -> EpochChoice | None:
        """Return the epoch end that the run releases; None if epochs are not compared."""
        if self.best is None or self.compare is None or self.epochs_done is None:
            return None
        released = self.best.released_standing
        if self.progress.step < self.total_steps:
            self.show_again(without=released.step)
        return EpochChoice(released, tuple(self.best.standings), self.resolved.n_epochs)

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

    @cached_property
    def _identity(self) -> Identity:
        held = self.validation if self.references or self.best else ()
        facts = self.objective.task, self.objective.safe, self.pairs, held
        return Identity(self.base.digest, self.recipe, self.resolved, self.started_from, *facts)

    def _measure_tau(self) -> dict[str, float]:
        with disable_adapters(self.base.model):
            tau = self.method.measure_tau(self.objective.evaluate_plain)
            self.method.measure_rows(self.objective.base_losses)
        return distributed.broadcast_scalars(tau, self.base.device) if tau else tau

    def _measure_references(self) -> None:
        """Compute the reference log-probabilities of pairs with the model before training.

        That is the base model, or the adapter that the run starts from.
        """
        if self.references:
            # Unlike for tau, an adapter to start from stays on: DPO measures change from where the training begins.
            with nullcontext() if self.started_from else disable_adapters(self.base.model):
                tell = name_work(self.hooks.on_work, "computing how likely both answers of each pair are")
                self.references = References.from_base(self.base, self.objective.task, self.validation, tell)

    def _rows(self, step: int) -> list[int]:
        number, i = divmod(step, self.steps_per_epoch)
        if self.epoch[0] != number:
            size = self.resolved.batch_size
            self.epoch = number, batches(self.recipe.seed, number, self.lengths, size, shuffle=self.shuffle)
        return self.epoch[1][i]

    def _safe(self, theta: Vector) -> Mapping[str, Loss]:
        """Return the safe losses on the next safe batch."""
        n, size = len(self.objective.safe), self.method.safe_batch_size(self.resolved.batch_size)
        rows = safe_rows(self.recipe.seed, self.progress.safe_batches, n, size)
        self.progress.safe_batches += 1
        return self.objective.safe_losses(theta, rows)
