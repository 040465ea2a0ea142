from __future__ import annotations

import torch
from spard_lab.lab.pretrain import Muon, orthogonalize


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    generator = torch.Generator().manual_seed(0)

    for shape in ((3, 8, 8), (2, 20, 6), (2, 6, 20)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, generator=generator)))
        assert 0.5 < values.min() < values.max() < 1.3


def test_orthogonalized_matrices_keep_their_singular_vectors() -> None:
    matrix = torch.diag(torch.tensor([3.0, 2.0, 1.0]))

    found = orthogonalize(matrix[None])[0]

    assert torch.allclose(found, torch.diag(found.diagonal()), atol=1e-5)
    assert (found.diagonal() > 0).all()


def test_muon_moves_matrices_of_one_shape_as_if_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    starts, grads = (torch.randn(2, 4, 6, generator=generator) for _ in range(2))
    together, alone = [start.clone() for start in starts], starts[1].clone()

    Muon(together, weight_decay=0.1).step(list(grads), lr=0.02)
    Muon([alone], weight_decay=0.1).step([grads[1]], lr=0.02)

    assert torch.allclose(together[1], alone, atol=1e-6)
    assert not torch.equal(alone, starts[1])
