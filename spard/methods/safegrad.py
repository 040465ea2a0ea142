r"""SafeGrad (Yi et al., 2025): remove the part of the task gradient that undoes alignment.

    g_u = grad CE(task),   g_a = grad KL(P_theta0 || P_theta) on safe rows, theta0 the model before training
    if <g_u, g_a> < 0:   g_u <- g_u - (<g_u, g_a> / |g_a|^2) g_a
    theta <- AdamW(theta, g_u + rho g_a)

As in the paper, the products run over all trained parameters at once, at every step. Three points differ from other
implementations: the surgery happens once per optimizer step, on whole accumulated gradients, before the sum is
clipped; the KL is a mean over answer tokens, without prompt and padding; products are accumulated in float32. At the
start of a LoRA training the gradient of the KL is zero, so surgery is skipped for |g_a|^2 <= 1e-9.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from spard.config import SafeGrad as SafeGradSettings
from spard.data.batches import Batch
from spard.losses.gradients import Loss, Losses, ValueAndGrad, clip_, safe_divergence
from spard.losses.relative import make_reference
from spard.losses.vectors import Vector, add_, inner
from spard.methods.base import Method, Metrics, Plan, descend_, report, require_finite
from spard.models.base import Base

FLAT = 1e-9  # largest |g_a|^2 that is treated as zero


class SafeGrad(Method[SafeGradSettings]):
    """One optimizer step along the sum of the corrected task gradient and the alignment gradient."""

    clips_gradients = True

    def safe_batch_size(self, batch_size: int) -> int:
        """Return the setting `safe_batch_size`; "auto" is the batch size of the run."""
        return batch_size if self.settings.safe_batch_size == "auto" else self.settings.safe_batch_size

    def prepare(self, base: Base, *, has_lora: bool) -> None:
        """Store the model before training, the reference of the KL."""
        self.reference = make_reference(base.model, has_lora=has_lora)

    def start(self, plan: Plan) -> None:
        """Store the norm that the sum of both gradients is clipped to."""
        self.max_norm = plan.max_grad_norm

    def step(self, theta: Vector, task: ValueAndGrad, safe: Losses, optimizer: Optimizer) -> Metrics:
        """Step: theta <- AdamW(theta, g_u + rho g_a), with the part of g_u that conflicts with g_a removed."""
        # Gradients of both losses at the same theta
        utility = task()
        alignment = safe()["kl"]
        require_finite("task", utility.loss, utility.norm)
        require_finite("safe", alignment.value)
        g_u, g_a = utility.grad, alignment.grad()

        # Surgery:  g_u <- g_u - (<g_u, g_a> / |g_a|^2) g_a   if they conflict
        product = remove_conflict_(g_u, g_a)

        # theta <- AdamW(theta, g_u + rho g_a)
        add_(g_u, g_a, self.settings.rho)
        length = clip_(g_u, self.max_norm)
        require_finite("combined", length)
        descend_(optimizer, theta, g_u)
        return report(utility) | {
            "loss/safe_kl": alignment.value,
            "safegrad/conflict": float(product < 0),
            "safegrad/norm": length,
        }

    def safe_losses(self, model: Any, theta: Vector, batch: Batch) -> Mapping[str, Loss]:
        """Return {"kl": mean KL divergence from the model before training, over answer tokens}."""
        return safe_divergence(model, theta, batch, self.reference)


def remove_conflict_(g: Vector, other: Vector) -> float:
    """Make `g` orthogonal to `other` in place if their inner product is negative; return the product before that."""
    numbers: list[float] = torch.stack([inner(g, other), inner(other, other)]).tolist()
    product, sq_norm = numbers
    if product < 0 and sq_norm > FLAT:
        add_(g, other, -product / sq_norm)
    return product
