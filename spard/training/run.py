"""The parts of a training run: its result, its progress, the content of its resume states, and its identity."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from spard.config import Recipe, ResolvedNumbers
from spard.config.anchors import Kind
from spard.config.earlier_versions import without_added
from spard.data.chat import EncodedSample
from spard.losses.anchor import Pair
from spard.losses.vectors import Vector
from spard.methods.base import Metrics
from spard.models.budget import Report
from spard.models.sharding import Shards
from spard.training.compute import Compute
from spard.training.epoch_ends import EpochCallback, EpochChoice, EpochEvaluator, References
from spard.training.resume_state import SavedState


@dataclass(frozen=True, slots=True)
class Hooks:
    """The callbacks of a training; `spard.training.train.train` describes them."""

    on_step: Callable[[int, int, Metrics], None] | None = None
    on_saved: Callable[[SavedState, Metrics], None] | None = None
    on_epoch: EpochCallback | None = None
    compare: EpochEvaluator | None = None
    should_stop: Callable[[], bool] | None = None
    shows_last: Callable[[], bool] | None = None
    kept_ends: int | None = None
    on_work: Report | None = None


@dataclass(frozen=True, slots=True)
class TrainedModel:
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
    ended: EpochChoice | None = None  # the released epoch end, if they were compared
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
    `Trainer.show_again`.
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
    resolved: ResolvedNumbers
    started_from: str | None
    task: Sequence[EncodedSample]
    safe: Sequence[EncodedSample]
    pairs: Mapping[Kind, Sequence[Pair]]
    held: Sequence[EncodedSample]

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
