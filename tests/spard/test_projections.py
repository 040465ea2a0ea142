from __future__ import annotations

import math

import pytest
import torch

from spard.losses.vectors import add_, dot, norm, size
from spard.methods.constraint import halfspace_step


@pytest.mark.parametrize(
    ("violation", "sq_norm", "max_step", "alpha"),
    [
        (0.5, 2.0, 1.0, 0.25),
        (0.5, 2.0, 0.1, 0.1),
        (0.0, 2.0, 1.0, 0.0),
        (-0.5, 2.0, 1.0, 0.0),
        (0.5, 0.0, 1.0, 0.0),
        (2.0, 4.0, math.inf, 0.5),
    ],
)
def test_the_step_length_is_that_of_the_table(violation: float, sq_norm: float, max_step: float, alpha: float) -> None:
    assert halfspace_step(violation, sq_norm, max_step) == alpha


@pytest.mark.parametrize("seed", range(5))
def test_the_projection_is_the_nearest_feasible_point(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    theta, g = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    loss, tau = 3.0, 1.0
    nearest = theta - halfspace_step(loss - tau, float(g @ g), math.inf) * g

    assert loss + float(g @ (nearest - theta)) == pytest.approx(tau)
    for _ in range(50):
        other = theta + 3 * torch.randn(6, generator=generator, dtype=torch.float64)
        if loss + float(g @ (other - theta)) <= tau:
            assert (other - theta).norm() >= (nearest - theta).norm()


def test_vectors_behave_like_one_long_vector() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = ([torch.randn(shape, generator=generator) for shape in [(3, 2), (5,)]] for _ in range(2))
    long_x, long_y = (torch.cat([part.flatten() for part in each]) for each in (x, y))
    terms = long_x.double() * long_y.double()  # of size 1; they all but cancel, and what rounds is the terms

    assert dot(x, y) == pytest.approx(float(terms.sum()), abs=1e-6 * float(terms.abs().sum()))
    assert float(norm(x)) == pytest.approx(float(long_x.double().norm()), rel=1e-5)
    assert size(x) == 11
    add_(x, y, 2.0)
    torch.testing.assert_close(torch.cat([part.flatten() for part in x]), long_x + 2 * long_y)
