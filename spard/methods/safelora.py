r"""SafeLoRA (Hsu et al., 2024): after training, project updates onto what alignment once changed.

For a weight let V = W_aligned - W_unaligned and C = V V^T / |V|_F. An update D = B A is compared with C D: where
cos(C D, D) is low the update leaves the aligned subspace and D <- C D, that is B <- C B. C is not a projector, its
eigenvalues are sigma^2 / |V|_F, so it shrinks the update as well; this is the authors' definition and kept.

Which weights: those of the `layers` lowest cosines (the authors' default, ties included), or all up to `threshold`.
Weights are matched by their modules' names. In full fine-tuning D = W - W_aligned, of every linear layer but the head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spard.config import SafeLora


def projected(update: Tensor, V: Tensor) -> Tensor:
    """C D = V (V^T D) / |V|_F, without C; an alignment that changed nothing leaves no update."""
    length = torch.linalg.vector_norm(V)
    return V @ (V.T @ update) / length if length > 0 else torch.zeros_like(update)


def agreement(update: Tensor, V: Tensor) -> float:
    """cos(C D, D); 1 for an update of zeros, which needs no projection."""
    along = projected(update, V)
    scale = float(torch.linalg.vector_norm(along) * torch.linalg.vector_norm(update))
    if not update.any():
        return 1.0
    return float((along * update).sum()) / scale if scale > 0 else 0.0


def to_project(cosines: Mapping[str, float], cfg: SafeLora) -> list[str]:
    """The names of the weights whose updates are projected."""
    threshold = cfg.threshold
    if cfg.layers is not None:
        threshold = sorted(cosines.values())[min(cfg.layers, len(cosines)) - 1]
    return [name for name, cosine in cosines.items() if cosine <= threshold]
