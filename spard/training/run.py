"""One run of the training loop: model, optimizer and progress, with its steps, resume states and result."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from numpy.random import SeedSequence
from torch import Tensor

from spard import distributed
from spard.config import Recipe, Resolved
from spard.config.added import without_added
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
from spard.training.energy import EnergyMeter
from spard.training.objective import Objective, safe_rows, schedule
from spard.training.operations import Compute, OperationCounter
from spard.training.optimizers import open_optimizer, parameter_state, restore_
from spard.training.references import References, evaluate_validation
from spard.training.resume_state import Saved, load, newest_first, save, save_together, strip_prefix


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained model, a `PeftModel` or a whole model, with the metrics of each step.

    seconds     time spent in steps, over all attempts of the run.
    ended       the epoch end that was released, if epochs were compared.
    references  reference log-probabilities of preference pairs, for DPO.
    """

    model: Any = field(repr=False)
    steps: int
    trained_tokens: int
    seconds: float
    tau: dict[str, float]
    metrics: list[Metrics] = field(repr=False)
    references: References | None = field(default=None, repr=False)
    ended: Ended | None = None  # the released epoch end, if they were compared
    compute: Compute | None = None


@dataclass(slots=True)
class Progress:
    """The part of a resume state beside parameters, optimizer and method."""

    step: int = 0
    tokens: int = 0
    safe_batches: int = 0
    seconds: float = 0.0
    tau: dict[str, float] = field(default_factory=dict)
    metrics: list[Metrics] = field(default_factory=list)
    operations: int | None = 0  # floating-point ones; None where those before a restart were not counted
    forward_tokens: int = 0
    backward_tokens: int = 0
    energy_j: dict[str, float] = field(default_factory=dict)

    def add_compute(self, operations: int, forward_tokens: int, backward_tokens: int) -> None:
        """Add the operations and padded tokens of some passes."""
        if self.operations is not None:
            self.operations += operations
        self.forward_tokens += forward_tokens
        self.backward_tokens += backward_tokens

    def add_energy(self, used: Mapping[str, float]) -> None:
        """Add joules by device."""
        for name, joules in used.items():
            self.energy_j[name] = self.energy_j.get(name, 0.0) + joules


_PREFIX = "recent/"  # of names in a resume state: recent/{step}/{parameter}


class RecentWeights:
    """Trained weights at the latest `epochs` epoch ends, in the form that is served, by step, in main memory.

    An epoch end whose checkpoint would not be kept is audited again if the run ends soon after it; see
    `Ends.show_again`.
    """

    def __init__(self, theta: Mapping[str, Tensor], epochs: int) -> None:
        self._theta, self._epochs = theta, epochs
        self._weights: dict[int, dict[str, Tensor]] = {}

    @property
    def steps(self) -> list[int]:
        """The steps whose weights are stored, latest first."""
        return sorted(self._weights, reverse=True)

    def add(self, step: int) -> None:
        """Store the model's current weights under `step`, unless `epochs` is 0."""
        if self._epochs < 1:
            return
        self._weights[step] = {name: part.detach().to("cpu", copy=True) for name, part in self._theta.items()}

    def forget_old(self, step: int, steps_per_epoch: int) -> None:
        """Drop the weights of all but the latest `epochs` epoch ends, of which `step` is the newest."""
        first = step - (self._epochs - 1) * steps_per_epoch  # step of the oldest epoch end to keep
        self._weights = {each: kept for each, kept in self._weights.items() if each >= first}

    def save(self, tensors: dict[str, Tensor]) -> None:
        """Add the weights to a resume state's tensors, under names that earlier versions ignore."""
        for step, kept in self._weights.items():
            tensors |= {f"{_PREFIX}{step}/{name}": part for name, part in kept.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the weights of a resume state."""
        self._weights = {}
        for name, part in tensors.items():
            if name.startswith(_PREFIX):
                step, _, own = name.removeprefix(_PREFIX).partition("/")
                self._weights.setdefault(int(step), {})[own] = part.to("cpu")

    @torch.no_grad()
    def put_(self, step: int) -> None:
        """Copy the weights of a step into the model."""
        for name, part in self._weights[step].items():
            self._theta[name].copy_(part)


# The layout of a resume state's tensors on ranks: a tensor of a sharded parameter is sharded in the same way.

METHOD = "method/"  # prefix of the method's tensors; the last part of a name may be a parameter's index


class Layout:
    """The trained parameters by name and index, and their shards if there are any."""

    def __init__(self, names: Sequence[str], vector: Vector) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self._shards = vector if isinstance(vector, Shards) else None

    @property
    def is_cut(self) -> bool:
        """True if the parameters are sharded over ranks, so that all ranks have to save."""
        return self._shards is not None

    def join_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """Return a shard as a distributed tensor that all ranks save together; a whole tensor is returned unchanged."""
        place = self._place(name)
        if self._shards is None or place is None or tensor.shape != self._shards[place].shape:
            return tensor
        return self._shards.join_part(place, tensor)

    def empty(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return an empty tensor for loading: of the saved shape, or distributed if the parameter is sharded."""
        place = self._place(name)
        if self._shards is None or place is None or shape != self._shards.parameters[place].shape:
            return torch.empty(shape, dtype=dtype)
        return self._shards.join_part(place, torch.empty_like(self._shards[place], dtype=dtype))

    def _place(self, name: str) -> int | None:
        if name.startswith(METHOD):
            last = name.rpartition("/")[2]
            return int(last) if last.isdecimal() and int(last) < len(self._places) else None
        return self._places.get(name.partition("/")[2])


@dataclass(frozen=True)
class Identity:
    """The facts that decide a run's numbers: base model, recipe, starting adapter and rows.

    held  the validation rows if they influence the result: they compare epochs, or are preference pairs with references
    """

    base_digest: str
    recipe: Recipe
    resolved: Resolved
    started_from: str | None
    task: Sequence[Encoded]
    safe: Sequence[Encoded]
    pairs: Mapping[Kind, Sequence[Pair]]
    held: Sequence[Encoded]

    @cached_property
    def digest(self) -> str:
        """The digest of all facts; computed once, because it hashes all rows."""
        return self._digest(checkpointing=False)

    def matches(self, run: str) -> bool:
        """Return True if a resume state with the digest `run` belongs to this run.

        Older versions included `gradient_checkpointing` in the digest; their resume states match too.
        """
        return run == self.digest or run == self._digest(checkpointing=True)

    def _digest(self, *, checkpointing: bool) -> str:
        """Return the digest without the settings that only change rounding or timing, such as the micro-batch size."""
        same = replace(self.recipe, checkpoint_every_s=1.0, micro_batch_size=None, pass_tokens=None, sharding="none")
        same = replace(same, gradient_checkpointing=checkpointing)
        recipe = without_added(asdict(same))
        recipe["anchor_weight"] = recipe.pop("anchor")  # its name in 0.1, whose resume states still match
        recipe["audit"] = {"suites": None, "max_prompts": 500, "max_new_tokens": 64}  # the defaults of 0.1
        rows = [(each.ids, each.labels) for row in (*self.task, *self.safe) for each in row.both]
        pairs = {kind: [(pair.asked.ids, pair.kept.ids) for pair in found] for kind, found in self.pairs.items()}
        held = [[each.ids, each.labels] for row in self.held for each in row.both]
        facts = [self.base_digest, recipe, asdict(self.resolved), rows, *filter(None, [self.started_from, pairs, held])]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


# An exponential moving average of the weights, released instead of the last weights (Kim et al., 2025).
#
#     mean <- d mean + (1 - d) theta   after every step, starting with the weights before training
#
# Because the average starts at the model before training, the result stays near it, the more so the shorter the run:
# after T steps the start still has weight d^T.


class Ema:
    """The moving average of named parameters."""

    def __init__(self, theta: Mapping[str, Tensor], decay: float) -> None:
        self.theta, self.decay = theta, decay
        self.mean = {name: part.detach().clone() for name, part in theta.items()}

    @torch.no_grad()
    def update_(self) -> None:
        """Add the current parameters to the average."""
        torch._foreach_lerp_(list(self.mean.values()), list(self.theta.values()), 1 - self.decay)

    @torch.no_grad()
    def release_(self) -> None:
        """Copy the average into the model."""
        for name, part in self.theta.items():
            part.copy_(self.mean[name])

    def restore(self, mean: Mapping[str, Tensor]) -> None:
        """Replace the average by one from a resume state."""
        self.mean = {name: mean[name].to(part.device) for name, part in self.theta.items()}


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
