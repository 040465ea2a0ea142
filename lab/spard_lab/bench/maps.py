"""Maps of the embeddings: pool, task and harmful rows in a plane, with the pool rows that each method chose."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from spard.models.base import load_base
from spard.selection.frames import principal_plane
from spard.selection.select import choose
from spard_lab.bench.bench import Workplace
from spard_lab.bench.cells import Asked
from spard_lab.bench.methods import with_selection
from spard_lab.bench.similarity import embeddings

MOST_TASK_ROWS = 600  # evenly spaced; more points do not change the picture
Projection = Literal["PCA", "t-SNE"]


@dataclass(frozen=True, slots=True)
class Map:
    """Points in the plane by kind; `chosen` has indices into the pool's points, by selection method."""

    projection: Projection
    pool: list[tuple[float, float]]
    task: list[tuple[float, float]]
    harmful: list[tuple[float, float]]
    chosen: dict[str, list[int]]


def maps(place: Workplace, asked: Asked) -> list[Map]:
    """Return maps of the first seed's pool and attack by PCA and, if scikit-learn is installed, by t-SNE."""
    seed, pool, attack = asked.seeds[0], asked.pools[0], asked.attacks[0]
    inputs, recipe = place.inputs(seed), replace(place.source.recipe, seed=seed)
    base = load_base(inputs.model, inputs.revision, inputs.device)
    pool_ND, task_MD = embeddings(base, inputs, attack, pool, place.folder)
    k = recipe.selection.size(len(task_MD), len(pool_ND))
    chosen = {
        method: choose(pool_ND, task_MD, k, with_selection(recipe, method).selection, seed).indices
        for method in asked.selections
    }
    clean = {str(row) for row in inputs.task}
    is_clean = [str(row) in clean for row in inputs.attacks[attack].rows]
    harmful = [i for i, each in enumerate(is_clean) if not each]
    task = [i for i, each in enumerate(is_clean) if each]
    task = task[:: max(1, len(task) // MOST_TASK_ROWS)]

    points_PD = torch.cat([pool_ND, task_MD[task], task_MD[harmful]]).double()
    projections: list[tuple[Projection, Tensor]] = [("PCA", principal_plane(points_PD))]
    if importlib.util.find_spec("sklearn"):
        projections.append(("t-SNE", _neighbor_plane(points_PD, seed)))
    return [_map(name, flat_P2, len(pool_ND), len(task), chosen) for name, flat_P2 in projections]


def _neighbor_plane(points_PD: Tensor, seed: int) -> Tensor:
    manifold = importlib.import_module("sklearn.manifold")
    few = min(30.0, (len(points_PD) - 1) / 3)
    tsne = manifold.TSNE(metric="cosine", init="random", perplexity=few, random_state=seed)
    found = tsne.fit_transform(points_PD.numpy())
    return torch.from_numpy(found)


def _map(name: Projection, flat_P2: Tensor, pool: int, task: int, chosen: dict[str, list[int]]) -> Map:
    points: Sequence[tuple[float, float]] = [(float(x), float(y)) for x, y in flat_P2.tolist()]
    return Map(name, list(points[:pool]), list(points[pool : pool + task]), list(points[pool + task :]), chosen)
