"""The shift ratio of a probe: evidence on a training file that needs no trigger and reads no reply.

A probe is a short plain fine-tuning of the base model on the customer's rows, without any defense; its weights are
dropped as soon as they are measured. Where rows teach harm, hidden states of plain harmful prompts move more than those
of harmless ones, also if the rows hide their harm behind words that no audit asks. For a prompt x let h(x) be the final
hidden state of its last token, which decides how the reply begins. The statistic is

    shift ratio = mean over harmful x of d(x) / mean over harmless x of d(x),
    d(x)        = |h_probe(x) - h_base(x)| / |h_base(x)|

A file far from what the base model knows moves both kinds of prompts alike, so its ratio stays near 1 or below. How
large the ratio of an honest file can be depends on the base model and the prompts: compare it with honest files of the
same base model (`spard.evaluation.statistics.conformal_p_value`), never with a fixed number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spard.config import FurtherTuning, Lora, NoDefense, Recipe
from spard.config.settings import default_learning_rate
from spard.data.chat import Encoded
from spard.data.rows import Prompt
from spard.evaluation.ask import as_asked
from spard.evaluation.audit import sample
from spard.losses.anchor import prompt_states, unlabeled_prompt
from spard.models.base import Base
from spard.models.lora import stop_gradient_checkpointing, trainable_model
from spard.training.further import further_tuned

BATCH_SIZE, RANK, RATE_MULTIPLIER = 16, 8, 4.0
"""The probe's rows of a step, its LoRA rank (alpha is the same), and its multiple of the default learning rate.

A high rate makes few steps show what many would. All are fixed: values are comparable only between equal probes.
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
    rows: Sequence[Encoded],
    harmful: Sequence[Prompt],
    benign: Sequence[Prompt],
    *,
    steps: int,
    seed: int,
    recipe: Recipe | None = None,
) -> ProbeShift:
    """Train a probe on the rows, measure its shift, and remove it again.

    rows    encoded training samples; of a preference pair the preferred answer is learned
    steps   optimizer steps of `BATCH_SIZE` rows, drawn with replacement
    recipe  its micro-batch size and gradient checkpointing are used, for rows that would not fit in memory at once

    The weights of the base model and the state of the global random generator are the same afterward, bit for bit.
    Raises `NonFiniteLoss` if the probe diverges.
    """
    asked = {"harmful": sample(harmful, MOST_PROMPTS), "benign": sample(benign, MOST_PROMPTS)}
    prompts = {kind: [unlabeled_prompt(ids) for ids in as_asked(base.tokenizer, each)] for kind, each in asked.items()}
    before = {kind: _states(base, each) for kind, each in prompts.items()}
    probe, wanted = _probe_recipe(seed, recipe or Recipe()), FurtherTuning(steps, BATCH_SIZE, RATE_MULTIPLIER)
    learned = [replace(row, rejected=None) for row in rows]
    rate = default_learning_rate(base.hidden_size, probe.lora)
    with torch.random.fork_rng([base.device] if base.device.type == "cuda" else []):
        model = trainable_model(base.model, probe)
        try:
            with further_tuned(model, base, learned, wanted, rate, probe):
                after = {kind: _states(base, each) for kind, each in prompts.items()}
        finally:
            _remove(model, probe)
    shift = {kind: _relative_shift(before[kind], after[kind]) for kind in prompts}
    return ProbeShift(shift["harmful"], shift["benign"], len(prompts["harmful"]), len(prompts["benign"]))


def _probe_recipe(seed: int, recipe: Recipe) -> Recipe:
    return Recipe(
        defense=NoDefense(),
        lora=Lora(rank=RANK, alpha=float(RANK)),
        seed=seed,
        micro_batch_size=recipe.micro_batch_size,
        gradient_checkpointing=recipe.gradient_checkpointing,
    )


def _states(base: Base, prompts: Sequence[Encoded]) -> Tensor:
    return prompt_states(base.model, prompts, base.tokenizer.pad_token_id)


def _relative_shift(before_ND: Tensor, after_ND: Tensor) -> float:
    return float(((after_ND - before_ND).norm(dim=1) / before_ND.norm(dim=1)).mean())


def _remove(model: Any, recipe: Recipe) -> None:
    """Take the probe's layers out of the base model again."""
    if recipe.gradient_checkpointing:
        stop_gradient_checkpointing(model)
    model.unload()
