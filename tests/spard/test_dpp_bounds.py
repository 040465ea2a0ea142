"""The shortcuts of greedy selection: its bounds hold and are tight, its windows are few, its ties go by index."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spard.selection import dpp
from spard.selection.dpp import FRONT, SHARE, Contenders


def normal(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sweep_leaves_bounds_that_hold_and_are_tight(dtype: torch.dtype) -> None:
    pool_ND = normal(4000, 600).to(dtype)  # more than one block
    q_N = torch.rand(4000, generator=torch.Generator().manual_seed(1)).double()
    rows = Contenders(pool_ND, q_N, 2.0, None, least=4000, most=30)
    rows_ND = rows.rows(torch.arange(4000))
    basis_MD = torch.linalg.qr(rows_ND[:30].T).Q.T

    rows.add(basis_MD)
    rows.tighten(4000)

    gain_N = (rows_ND - (rows_ND @ basis_MD.T) @ basis_MD).square().sum(dim=1)
    slack_N = (rows.bound_C - gain_N) / rows.weight_C.square().clamp(min=1e-300)
    rounding = 1e-13 if dtype == torch.float64 else 0.0  # of the definition itself
    assert float(rows.bound_C.min()) >= 0.0
    assert float(slack_N.min()) >= -rounding
    error = 2 * torch.finfo(dtype).eps * (30 * 600) ** 0.5
    assert float(slack_N.max()) <= 1.5 * error + rounding


def test_each_bound_is_lowered_once_by_each_direction() -> None:
    """Rows of the front are ahead of the others, rows of the window ahead of the front."""
    pool_ND = normal(4000, 600)
    q_N = 1.0 - 0.5 * torch.rand(4000, generator=torch.Generator().manual_seed(1)).double()
    rows = Contenders(pool_ND, q_N, 2.0, None, least=4000, most=30)
    rows_ND = rows.rows(torch.arange(4000))
    basis_MD = torch.linalg.qr(rows_ND[:30].T).Q.T

    def gain() -> Tensor:
        return (rows_ND - (rows_ND @ rows.basis_KD.T) @ rows.basis_KD).square().sum(dim=1)

    rows.add(basis_MD[:10])
    rows.tighten(20)
    swept_C = rows.bound_C.clone()
    rows.add(basis_MD[10:25])
    window_B = swept_C.topk(20).indices
    rows.note_gains(window_B, gain()[window_B])
    rows.add(basis_MD[25:])
    rows.tighten(20)

    ahead = int((rows.bound_C != swept_C).sum())
    assert (rows.sweeps, ahead) == (1, 4000 // FRONT)
    rows.tighten(4000)
    assert rows.sweeps == 2
    slack_C = (rows.bound_C - gain()) / rows.weight_C.square()
    assert 0 <= float(slack_C.min()) <= float(slack_C.max()) <= 1e-4


def test_bounds_never_fall_below_nothing() -> None:
    pool_ND = torch.eye(3, dtype=torch.float64)
    rows = Contenders(pool_ND, torch.ones(3, dtype=torch.float64), 1.0, None, least=3, most=30)
    rows.bound_C = torch.tensor([0.25, 1.0, 0.0], dtype=torch.float64)

    rows.add(pool_ND[:1])
    rows.tighten(3)

    assert rows.bound_C.tolist() == [0.0, 1.0, 0.0]


def test_rows_of_little_weight_are_not_looked_at_until_they_could_be_picked() -> None:
    pool_ND = normal(900, 12)
    q_N = torch.linspace(0.01, 1.0, 900, dtype=torch.float64)
    rows = Contenders(pool_ND, q_N, 4.0, None, least=10, most=30)
    heavy = int((q_N.pow(8) >= SHARE).sum())
    assert rows.rows_C.tolist() == list(range(900 - heavy, 900))
    assert rows.beyond == pytest.approx(float(q_N[900 - heavy - 1]) ** 8)

    rows.add(torch.linalg.qr(normal(5, 12, 3).double().T).Q.T)
    rows.tighten(heavy)
    kept, whole = rows.bound_C.clone(), Contenders(pool_ND, q_N, 4.0, None, least=900, most=30)
    rows.look_at_more(1e-6)
    whole.add(rows.basis_KD)
    whole.tighten(900)

    assert rows.rows_C.tolist() == whole.rows_C[-len(rows.rows_C) :].tolist()
    assert torch.equal(rows.bound_C[-heavy:], kept)
    torch.testing.assert_close(rows.bound_C, whole.bound_C[-len(rows.rows_C) :], rtol=0, atol=1e-5)


def test_few_sweeps_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs a product with the whole pool; a window without a pick is made for nothing."""
    played: list[int] = []
    play = dpp._play

    def play_and_note(residual_BD: Tensor, *rest: object, **more: object) -> object:
        played.append(len(residual_BD))
        return play(residual_BD, *rest, **more)  # type: ignore[arg-type]

    swept: list[int] = []
    add = Contenders.add

    def noted_add(rows: Contenders, new_MD: Tensor) -> None:
        swept.append(len(new_MD))
        add(rows, new_MD)

    monkeypatch.setattr(dpp, "_play", play_and_note)
    monkeypatch.setattr(Contenders, "add", noted_add)
    pool_ND = normal(6000, 64) * torch.logspace(0, -1, 64) + normal(1, 64, 99)
    found = dpp.greedy(pool_ND, dpp.quality(pool_ND, normal(40, 64, 5)), 48)

    assert found.rank == 48
    assert 0 < found.sweeps <= 12
    assert found.sweeps <= len(swept)
    assert sum(swept) < 48  # none after the last pick
    assert len(played) <= 2 * (len(swept) + 1)
    assert sum(played) <= 6000
    assert min(played) == dpp.WIDEST


def test_equals_beyond_the_window_go_to_the_lowest_index() -> None:
    rows = dpp.WIDEST + 200
    q_N = 1.0 - torch.arange(rows, 0, -1).double() * 1e-16  # rising with the index, equal within the tolerance
    assert dpp.greedy(torch.eye(rows, dtype=torch.float64), q_N, 3, beta=1.0).indices == [0, 1, 2]


def test_a_better_row_is_no_equal() -> None:
    q_N = torch.tensor([1.0, 1.0 + 1e-9, 1.0], dtype=torch.float64)
    assert dpp.greedy(torch.eye(3, dtype=torch.float64), q_N, 3, beta=1.0).indices == [1, 0, 2]


@pytest.mark.parametrize(("distance", "rank"), [(2.0**-19.5, 2), (2.0**-20.5, 1)])
def test_float32_rows_nearer_than_2_to_the_minus_20_add_nothing(distance: float, rank: int) -> None:
    pool_ND = torch.tensor([[1.0, 0.0], [1.0, distance]])
    assert dpp.greedy(pool_ND, torch.ones(2), 2).rank == rank


@pytest.mark.parametrize(("distance", "rank"), [(2.0**-32.5, 2), (2.0**-33.5, 1)])
def test_float64_rows_nearer_than_2_to_the_minus_33_add_nothing(distance: float, rank: int) -> None:
    """Where they are measured anew: the second direction lies outside the first window."""
    first_ND = torch.tensor([[1.0, 0.0]], dtype=torch.float64).repeat(dpp.WIDEST + 20, 1)
    pool_ND = torch.cat([first_ND, torch.tensor([[1.0, distance]], dtype=torch.float64)])
    q_N = torch.ones(len(pool_ND)).index_fill(0, torch.tensor([len(pool_ND) - 1]), 0.5)
    assert dpp.greedy(pool_ND, q_N, 2, beta=1.0).rank == rank


@pytest.mark.parametrize(
    ("size", "window", "rest"),
    [
        (1, [2], [1.0, 2.0, -1.0, 2.0, 2.0, 0.0]),
        (2, [1, 2], [1.0, -1.0, -1.0, 2.0, 2.0, 0.0]),
        (3, [1, 2, 3], [1.0, -1.0, -1.0, -1.0, 2.0, 0.0]),
        (5, [0, 1, 2, 3, 4], [-1.0, -1.0, -1.0, -1.0, -1.0, 0.0]),
        (6, [0, 1, 2, 3, 4, 5], [-1.0] * 6),
        (9, [0, 1, 2, 3, 4, 5], [-1.0] * 6),
    ],
)
def test_a_window_holds_the_largest_bounds_the_lowest_indices_among_equals(
    size: int, window: list[int], rest: list[float]
) -> None:
    bound_N = torch.tensor([1.0, 2.0, 3.0, 2.0, 2.0, 0.0], dtype=torch.float64)
    found_B, rest_N = dpp._window(bound_N, size)
    assert found_B.tolist() == window
    assert [value if value >= 0 else -1.0 for value in rest_N.tolist()] == rest


def test_the_first_row_outside_is_that_of_at_least_the_bound() -> None:
    rest_N = torch.tensor([-1.0, 0.5, 0.75, 0.75], dtype=torch.float64)
    assert [dpp._first(rest_N, least) for least in (0.5, 0.75, 0.8)] == [1, 2, 4]


def test_a_relevance_below_nothing_is_none() -> None:
    found = dpp.greedy(torch.eye(3), torch.tensor([-3.0, 0.5, 0.25]), 3, beta=2.0)
    assert (found.indices, found.rank) == ([1, 2, 0], 2)


def test_gains_are_in_the_scale_of_the_kernel() -> None:
    q_N = torch.tensor([0.5, 0.25], dtype=torch.float64)
    assert dpp.greedy(torch.eye(2), q_N, 2, beta=3.0).gains == pytest.approx([0.5**6, 0.25**6])


def test_the_usual_power_is_four() -> None:
    q_N = torch.tensor([0.5, 0.25], dtype=torch.float64)
    assert dpp.greedy(torch.eye(2), q_N, 2).gains == pytest.approx([0.5**8, 0.25**8])
    pool_ND, task_MD = normal(200, 8), normal(9, 8, 1)
    assert dpp.select(pool_ND, task_MD, 8) == dpp.select(pool_ND, task_MD, 8, beta=4.0)


def test_a_fill_stops_when_it_is_full_and_keeps_copies_for_the_end() -> None:
    pool_ND = torch.tensor([[1.0], [1.0], [2.0], [3.0], [2.0]])
    asked: list[int] = []

    def order() -> object:
        for i in (1, 0, 2, 4, 3):
            asked.append(i)
            yield i

    assert dpp.fill(pool_ND, order(), [0], 2) == [0, 2]  # type: ignore[arg-type]
    assert asked == [1, 0, 2, 4]
    assert dpp.fill(pool_ND, [1, 0, 2, 4, 3], [0], 4) == [0, 2, 3, 1]
    assert dpp.fill(pool_ND, [1, 0, 2, 4, 3], [0], 9) == [0, 2, 3, 1, 4]


def test_without_a_relevant_row_the_order_is_that_of_the_pool() -> None:
    found = dpp.greedy(torch.eye(3), torch.zeros(3), 2)
    assert (found.indices, found.gains, found.relevance, found.rank, found.sweeps) == ([0, 1], [], [0.0, 0.0], 0, 0)


def test_gains_that_fall_far_are_computed_anew() -> None:
    """Taken from one Cholesky factor they lose as many digits as they fall below its first."""
    columns = 0.25 ** torch.arange(12, dtype=torch.float64)
    pool_ND = normal(400, 12).double() * columns
    found = dpp.greedy(pool_ND, torch.ones(400), 12)

    chosen_ND = torch.nn.functional.normalize(pool_ND, dim=1)[found.indices]
    exact_N = torch.linalg.qr(chosen_ND.T).R.diagonal().square()
    assert found.rank == 12
    assert found.gains == pytest.approx(exact_N.tolist(), rel=1e-9, abs=0)


def test_rows_without_columns_are_taken_by_relevance() -> None:
    found = dpp.greedy(torch.zeros(3, 0), torch.tensor([0.25, 0.5, 0.75]), 2)
    assert (found.rank, found.indices) == (0, [2, 1])


@pytest.mark.parametrize("spread", [1.0, 1e-6])
def test_the_basis_stays_orthonormal_however_near_the_rows_are(monkeypatch: pytest.MonkeyPatch, spread: float) -> None:
    """A residual that is small beside its row has rounding errors along the chosen rows, which have to be removed."""
    made = list[Contenders]()

    class Recorded(Contenders):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(dpp, "Contenders", Recorded)
    pool_ND = (normal(1, 400, 1) + spread * normal(2000, 400)).double()

    found = dpp.greedy(pool_ND, torch.ones(2000, dtype=torch.float64), 200)

    basis_KD = made[0].basis_KD
    assert (found.rank, len(made)) == (200, 1)
    assert len(basis_KD) > 100
    assert float((basis_KD @ basis_KD.T - torch.eye(len(basis_KD), dtype=torch.float64)).abs().max()) < 1e-12
