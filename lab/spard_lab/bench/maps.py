"""Embeddings in the bench: the effect of the safe set's similarity, and maps of the rows in a plane.

The pool is cut into levels of relevance, and safe sets are drawn from each. The relevance q of a pool row is its
largest cosine with any training row. Level 1 has the least relevant rows; levels have equal size, and a run draws its
safe rows from one level at random, so that the levels differ only in q.

A map shows pool, task and harmful rows, with the pool rows that each method chose.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from spard.data.jsonl import file_chunks, numbered_texts, parse_row
from spard.data.row_rules import is_benign
from spard.data.rows import prompt_text, read_examples, read_pool
from spard.digests import file_sha256
from spard.models.base import Base, load_base
from spard.replacement import write_atomically
from spard.selection.embeddings import embed
from spard.selection.relevance import DIRECTIONS, fit_frame, principal_plane, quality
from spard.selection.select import choose
from spard_lab.bench.bench import Workplace
from spard_lab.bench.cells import BASE, Cell, TableChoices, selection_cells
from spard_lab.bench.measure import training_file
from spard_lab.bench.methods import with_selection
from spard_lab.bench.source import Inputs, Source

BINS = 40


def level_cells(source: Source, asked: TableChoices, levels: int) -> list[Cell]:
    """Return every method that uses a safe set, with one drawn at random from each level of the first pool."""
    asked = replace(asked, pools=asked.pools[:1], attacks=asked.attacks[:1], selections=("random",))
    found: list[Cell] = []
    for cell in selection_cells(source, asked):
        found += [cell] if cell.method == BASE else _levels(cell, levels)
    return found


def with_levels(inputs: Inputs, asked: TableChoices, seed: int, levels: int, folder: Path) -> Inputs:
    """Return the inputs with a pool for each level; the files are written below `folder`."""
    pool = asked.pools[0]
    texts = numbered_texts(file_chunks(inputs.pools[pool]))
    # Without benign rows, as `read_pool` reads a pool: the lines must have the order of q.
    lines = [text for line, text in texts if not is_benign(parse_row(text, line))]
    order_N = pool_quality(inputs, asked.attacks[0], pool, seed, folder).sort(stable=True).indices.tolist()
    pools = dict(inputs.pools)
    for level in range(1, levels + 1):
        rows = order_N[len(lines) * (level - 1) // levels : len(lines) * level // levels]
        name = level_name(pool, level, levels)
        pools[name] = folder / "pools" / f"seed-{seed}-{name.replace(' ', '-')}.jsonl"
        write_atomically(pools[name], "".join(f"{lines[i]}\n" for i in rows))
    return replace(inputs, pools=pools)


def _levels(cell: Cell, levels: int) -> list[Cell]:
    named = replace(cell, setting="similarity level")
    return [
        replace(named, pool=level_name(cell.pool, level, levels), value=str(level)) for level in range(1, levels + 1)
    ]


def level_name(pool: str, level: int, levels: int) -> str:
    """Return the name of a level's pool, used in tables, file names and the keys of stored runs."""
    return f"{pool} {level} of {levels}"


def pool_quality(inputs: Inputs, attack: str, pool: str, seed: int, folder: Path) -> Tensor:
    """Return q of every pool row against the attack's training file, `[N]`."""
    base = load_base(inputs.model, inputs.revision, inputs.device)
    pool_ND, task_MD = embeddings(base, inputs, attack, pool, folder)
    return quality(pool_ND, task_MD)


def embeddings(base: Base, inputs: Inputs, attack: str, pool: str, folder: Path) -> tuple[Tensor, Tensor]:
    """Return the vectors of pool rows `[N, D]` and of the attack's training rows `[M, D]`.

    They are in the frame in which the selection compares them by default.
    """
    rows = read_examples(training_file(inputs.attacks[attack].rows, folder / "files"))
    pool_ND = embed(base, [prompt_text(row) for row in read_pool(inputs.pools[pool])])
    frame = fit_frame(pool_ND, DIRECTIONS, int(file_sha256(inputs.pools[pool])[:15], 16))
    return frame.project(pool_ND), frame.project(embed(base, [prompt_text(row) for row in rows]))


def histogram(values: Tensor, bins: int = BINS) -> list[tuple[float, float, int]]:
    """Return equal bins over the range of the values, each with its bounds and count."""
    low, high = float(values.min()), float(values.max())
    counts = torch.histc(values.double(), bins, low, high).int().tolist()
    width = (high - low) / bins
    return [(low + i * width, low + (i + 1) * width, count) for i, count in enumerate(counts)]


def distributions(place: Workplace, asked: TableChoices) -> dict[str, list[tuple[float, float, int]]]:
    """Return the distribution of q in every requested pool, at the first seed and attack."""
    seed = asked.seeds[0]
    inputs = place.source.make(seed, place.split)
    found: Sequence[tuple[str, Tensor]] = [
        (pool, pool_quality(inputs, asked.attacks[0], pool, seed, place.folder)) for pool in asked.pools
    ]
    return {pool: histogram(q_N) for pool, q_N in found}


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


def maps(place: Workplace, asked: TableChoices) -> list[Map]:
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
