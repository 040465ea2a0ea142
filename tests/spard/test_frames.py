"""Embeddings from the pool's mean without their dominant directions: fitted once, the same in memory and in files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from spard.config import Selection
from spard.selection import dpp
from spard.selection.relevance import SAMPLE, fit_frame, in_frame, mean_cosine, sample_rows
from spard.selection.select import choose
from spard.selection.shards import Frame, FramedVectors, Shards, whole
from tests.spard.test_shards import map_pool

WIDTH = 64


def cone(rows: int, seed: int = 0) -> Tensor:
    """Return vectors with a large mean, two directions of large variance, and a small part that tells them apart."""
    draw = torch.Generator().manual_seed(seed)
    shared_2D = torch.linalg.qr(torch.randn(WIDTH, 2, generator=torch.Generator().manual_seed(9))).Q.T
    own_ND = torch.randn(rows, WIDTH, generator=draw)
    found_ND: Tensor = 20 + own_ND + 30 * torch.randn(rows, 2, generator=draw) @ shared_2D
    return found_ND


def test_a_frame_takes_out_the_mean_and_the_directions_of_largest_variance() -> None:
    pool_ND = cone(600).double()
    frame = fit_frame(pool_ND, 2, seed=0)
    centered_ND = pool_ND - pool_ND.mean(dim=0)
    _, _, axes = torch.linalg.svd(centered_ND, full_matrices=False)
    expected_ND = centered_ND - centered_ND @ axes[:2].T @ axes[:2]
    torch.testing.assert_close(frame.project(pool_ND).double(), expected_ND, rtol=1e-5, atol=1e-5)


def test_signs_and_order_of_directions_change_nothing() -> None:
    pool_ND, frame = cone(600), fit_frame(cone(600), 2, seed=0)
    other = Frame(frame.center_D, -frame.removed_KD.flip(0))
    torch.testing.assert_close(other.project(pool_ND), frame.project(pool_ND), rtol=1e-6, atol=1e-5)


def test_few_rows_and_many_rows_find_the_same_directions() -> None:
    """The products of rows and those of columns are two ways to one subspace."""
    wide_ND = torch.cat([cone(300), cone(300, 1)], dim=1)[:200].repeat(1, 4)  # fewer rows than columns
    frame = fit_frame(wide_ND, 2, seed=0)
    _, _, axes = torch.linalg.svd(wide_ND.double() - wide_ND.double().mean(dim=0), full_matrices=False)
    torch.testing.assert_close(frame.removed_KD.T @ frame.removed_KD, axes[:2].T @ axes[:2], rtol=1e-6, atol=1e-6)


def test_equal_rows_stay_equal_wherever_they_stand() -> None:
    pool_ND = cone(700)
    pool_ND[650] = pool_ND[3]
    frame = fit_frame(pool_ND, 2, seed=0)
    seen_ND = whole(in_frame(pool_ND, frame))
    alone_D = frame.project(pool_ND[650:651])[0]
    assert (
        next(dpp.row_bytes(seen_ND[3:4])) == next(dpp.row_bytes(seen_ND[650:651])) == next(dpp.row_bytes(alone_D[None]))
    )


def test_rows_in_files_are_seen_as_rows_in_memory_are(tmp_path: Path) -> None:
    pool_ND, task_MD = cone(900), cone(20, 5)
    shards = map_pool(pool_ND, tmp_path, [256, 600])
    frame, from_files = fit_frame(pool_ND, 2, seed=1), fit_frame(shards, 2, seed=1)
    torch.testing.assert_close(from_files.to_tensor(), frame.to_tensor(), rtol=1e-9, atol=1e-9)
    view = in_frame(shards, frame)
    assert isinstance(view, FramedVectors)
    assert torch.equal(whole(view), whole(in_frame(pool_ND, frame)))
    chosen = [choose(in_frame(each, frame), frame.project(task_MD), 30, Selection(), 0) for each in (shards, pool_ND)]
    assert chosen[0] == chosen[1]


def test_of_a_large_pool_the_directions_are_found_in_rows_that_the_seed_draws() -> None:
    pool_ND = cone(SAMPLE + 500)
    one, again, other = (fit_frame(pool_ND, 2, seed) for seed in (1, 1, 2))
    assert torch.equal(one.to_tensor(), again.to_tensor())
    assert torch.equal(one.center_D, other.center_D)
    assert not torch.equal(one.removed_KD, other.removed_KD)
    assert len(sample_rows(len(pool_ND), SAMPLE, 1)) == SAMPLE


@pytest.mark.parametrize(("rows", "expected"), [(1, 0), (63, 0), (64, 1), (640, 4)])
def test_a_small_pool_or_short_vectors_lose_fewer_directions(rows: int, expected: int) -> None:
    frame = fit_frame(cone(rows), 8, seed=0)
    assert len(frame.removed_KD) == expected
    assert bool(frame.project(cone(rows)).isfinite().all())


def test_a_frame_is_kept_as_a_tensor() -> None:
    frame = fit_frame(cone(300), 2, seed=0)
    found = Frame.from_tensor(frame.to_tensor())
    assert torch.equal(found.center_D, frame.center_D)
    assert torch.equal(found.removed_KD, frame.removed_KD)


def test_the_mean_cosine_is_that_of_all_pairs() -> None:
    pool_ND = cone(50)
    unit_ND = torch.nn.functional.normalize(pool_ND.double(), dim=1)
    cosines_NN = unit_ND @ unit_ND.T
    expected = float((cosines_NN.sum() - cosines_NN.diagonal().sum()) / (50 * 49))
    assert mean_cosine(pool_ND) == pytest.approx(expected)
    assert mean_cosine(Shards([pool_ND[:20], pool_ND[20:]])) == pytest.approx(expected)
    assert mean_cosine(pool_ND[:1]) == 0


def test_what_a_cone_hides_is_chosen_in_the_frame() -> None:
    """Half of the pool is like the task in the small part of its vectors, which the cone drowns."""
    draw = torch.Generator().manual_seed(3)
    topic_D = torch.randn(WIDTH, generator=draw)
    pool_ND, task_MD = cone(600), cone(20, 7) + 3 * topic_D
    pool_ND[:300] += 3 * topic_D
    frame = fit_frame(pool_ND, 2, seed=0)
    in_cone = choose(pool_ND, task_MD, 30, Selection(), 0).indices
    chosen = choose(in_frame(pool_ND, frame), frame.project(task_MD), 30, Selection(), 0).indices
    assert sum(i < 300 for i in chosen) >= 29 > sum(i < 300 for i in in_cone)
