r"""Muon (Jordan et al., 2024): momentum whose matrix is replaced by the nearest semi-orthogonal one.

    M <- mu M + G;   W <- (1 - lr lambda) W - lr max(1, rows / columns)^(1/2) U V^T,   G + mu M = U S V^T

It trains the lab's base model in about half the steps that AdamW takes. U V^T comes from five Newton-Schulz
iterations with the coefficients of Jordan et al.; matrices of one shape go through them together, in float32, since
many CPUs have no bfloat16 products. `torch.optim.Muon` (2.13) iterates in bfloat16, which would make other weights of
every lab, so it does not replace this one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5


class Muon:
    """The momenta of some matrices, stacked by shape."""

    def __init__(self, matrices: Sequence[Tensor], weight_decay: float, momentum: float = 0.95) -> None:
        self.weight_decay, self.momentum = weight_decay, momentum
        self.groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, matrix in enumerate(matrices):
            self.groups[tuple(matrix.shape)].append(i)
        self.matrices = matrices
        self.momenta = {shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()}

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], lr: float) -> None:
        """Move every matrix, in place."""
        for (rows, columns), group in self.groups.items():
            grad_GRC = torch.stack([grads[i] for i in group])
            momentum_GRC = self.momenta[rows, columns].mul_(self.momentum).add_(grad_GRC)
            update_GRC = orthogonalize(grad_GRC + self.momentum * momentum_GRC)
            for i, update_RC in zip(group, update_GRC, strict=True):
                self.matrices[i].mul_(1 - lr * self.weight_decay).sub_(
                    update_RC, alpha=lr * max(1.0, rows / columns) ** 0.5
                )


def orthogonalize(matrix_GRC: Tensor) -> Tensor:
    """About U V^T for each matrix U S V^T: singular values move into [0.7, 1.2]."""
    is_tall = matrix_GRC.shape[1] > matrix_GRC.shape[2]
    x: Tensor = matrix_GRC.mT if is_tall else matrix_GRC
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x.mT if is_tall else x
