from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spard.asr import rate
from spard.audit import SuiteResult
from spard.config import Audit, Hyperparameters, Recipe
from spard.lab import bench
from spard.lab.bench import Measurement, measure, summaries, summarize, table
from spard.lab.muon import Muon, orthogonalized


def result(suite: str, hits: int, n: int, unscored: int = 0) -> SuiteResult:
    share = rate(hits, n)
    return SuiteResult(
        suite,
        "utility" if suite == "utility" else "harmful",
        "refusal",
        n,
        unscored,
        unscored,
        hits,
        share.rate,
        share.low,
        share.high,
    )


FOUND = [
    Measurement(1, "none", (result("attacked", 90, 100), result("utility", 8, 10)), 5.0),
    Measurement(2, "none", (result("attacked", 80, 80, 20), result("utility", 6, 10)), 7.0),
]


def test_a_mean_comes_with_student_s_interval() -> None:
    found = summarize([1.0, 2.0, 3.0])

    assert (found.mean, found.sd) == (2.0, 1.0)
    assert (found.low, found.high) == pytest.approx((-0.484, 4.484), abs=1e-3)


def test_one_seed_has_no_interval() -> None:
    assert summarize([4.0]) == bench.Summary(4.0, None, None, None)


def test_garbage_counts_degenerate_replies_outside_utility() -> None:
    assert FOUND[1].garbage == 0.2


def test_figures_are_summarized_for_each_method() -> None:
    means = {name: summary.mean for name, summary in summaries(FOUND)["none"].items()}

    assert means == pytest.approx({"attacked": 95, "utility": 70, "garbage": 10, "training s": 6})


def test_the_table_shows_means_and_every_run() -> None:
    lines = table(FOUND, "dev").splitlines()

    assert "| none | 95.0 +- 7.1 [31.5, 158.5] |" in lines[8][:50]
    assert lines[-1].startswith("| 2 | none | 100.0 [95.4, 100.0] |")


def test_a_method_is_measured_on_a_lab(lab: Path) -> None:
    few_steps = Recipe(
        hyperparameters=Hyperparameters(n_epochs=1, batch_size=256), audit=Audit(max_prompts=20, max_new_tokens=4)
    )

    found = measure(lab, 1, "none", "dev", few_steps)

    assert [each.suite for each in found.results] == ["attacked", "other", "look-alike", "how-to", "utility"]
    assert found.train_s is not None
    assert found.trigger_rate is None


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    generator = torch.Generator().manual_seed(0)

    for shape in ((3, 8, 8), (2, 20, 6), (2, 6, 20)):
        values = torch.linalg.svdvals(orthogonalized(torch.randn(shape, generator=generator)))
        assert 0.5 < values.min() < values.max() < 1.3


def test_orthogonalized_matrices_keep_their_singular_vectors() -> None:
    matrix = torch.diag(torch.tensor([3.0, 2.0, 1.0]))

    found = orthogonalized(matrix[None])[0]

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
