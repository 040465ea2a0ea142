r"""Muon (Jordan et al., 2024): momentum SGD whose update is replaced by the nearest semi-orthogonal matrix.

    M <- mu M + G;   W <- (1 - lr lambda) W - lr max(1, rows / columns)^(1/2) U V^T,   G + mu M = U S V^T

It trains the lab's base model in about half the steps of AdamW. U V^T comes from five Newton-Schulz iterations with the
coefficients of Jordan et al.; matrices of one shape are batched, in float32, because many CPUs have no bfloat16
products. `torch.optim.Muon` (2.13) iterates in bfloat16, which would change the weights of every lab, so it does not
replace this one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5


class Muon:
    """The optimizer: momenta of the matrices, stacked by shape."""

    def __init__(self, matrices: Sequence[Tensor], weight_decay: float, momentum: float = 0.95) -> None:
        self.weight_decay, self.momentum = weight_decay, momentum
        self.groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, matrix in enumerate(matrices):
            self.groups[tuple(matrix.shape)].append(i)
        self.matrices = matrices
        self.momenta = {shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()}

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], lr: float) -> None:
        """Update every matrix in place; `grads` has the order of the matrices."""
        for (rows, columns), group in self.groups.items():
            grad_GRC = torch.stack([grads[i] for i in group])
            momentum_GRC = self.momenta[rows, columns].mul_(self.momentum).add_(grad_GRC)
            update_GRC = orthogonalize(grad_GRC + self.momentum * momentum_GRC)
            for i, update_RC in zip(group, update_GRC, strict=True):
                self.matrices[i].mul_(1 - lr * self.weight_decay).sub_(
                    update_RC, alpha=lr * max(1.0, rows / columns) ** 0.5
                )


def orthogonalize(matrix_GRC: Tensor) -> Tensor:
    """Return approximately U V^T for each matrix U S V^T, `[G, R, C]`; singular values end in [0.7, 1.2]."""
    # Iterate on the wide form: its Gram matrix is the smaller one.
    is_tall = matrix_GRC.shape[1] > matrix_GRC.shape[2]
    x: Tensor = matrix_GRC.mT if is_tall else matrix_GRC
    # The Frobenius norm is at least the largest singular value, so all are at most 1: the iteration needs that.
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x.mT if is_tall else x
