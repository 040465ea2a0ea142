"""The definitions that the fast code is compared with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize


def greedy_map(pool_ND: Tensor, q_N: Tensor, k: int, beta: float = 4.0) -> list[int]:
    """Greedy MAP by float64 Gram-Schmidt over the whole pool; ends when every row lies in the span of the chosen."""
    R_ND = normalize(pool_ND.double(), dim=1) * q_N.double().pow(beta).unsqueeze(1)
    floor_N = R_ND.square().sum(dim=1) * (2.0**-66 if pool_ND.dtype == torch.float64 else 2.0**-40)
    chosen: list[int] = []
    while len(chosen) < k:
        gain_N = R_ND.square().sum(dim=1)
        gain_N[gain_N <= floor_N] = 0.0
        if gain_N.max() == 0:
            break
        chosen.append(int((gain_N >= gain_N.max() * (1 - 1e-12)).nonzero()[0]))
        v_D = R_ND[chosen[-1]] / R_ND[chosen[-1]].norm()
        R_ND = R_ND - torch.outer(R_ND @ v_D, v_D)
    return chosen


def cosines(pool_ND: Tensor, task_MD: Tensor) -> Tensor:
    """Every cosine, in float64."""
    return normalize(pool_ND.double(), dim=1) @ normalize(task_MD.double(), dim=1).T
