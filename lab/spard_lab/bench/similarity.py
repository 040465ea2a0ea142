"""The effect of the safe set's similarity: the pool is cut into levels of relevance, and safe sets are drawn from each.

The relevance q of a pool row is its largest cosine with any training row. Level 1 has the least relevant rows; levels
have equal size, and a run draws its safe rows from one level at random, so that the levels differ only in q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from spard.data.jsonl import file_chunks, numbered_texts, parse_row
from spard.data.row_rules import is_benign
from spard.data.rows import prompt_text, read_examples, read_pool
from spard.digests import file_sha256
from spard.models.base import Base, load_base
from spard.selection.embeddings import embed
from spard.selection.frames import DIRECTIONS, fit_frame
from spard.selection.relevance import quality
from spard_lab.bench.bench import Workplace
from spard_lab.bench.cells import BASE, Asked, Cell, selection_cells
from spard_lab.bench.measure import training_file
from spard_lab.bench.source import Inputs, Source
from spard_lab.bench.store import write_aside

BINS = 40


def level_cells(source: Source, asked: Asked, levels: int) -> list[Cell]:
    """Return every method that uses a safe set, with one drawn at random from each level of the first pool."""
    asked = replace(asked, pools=asked.pools[:1], attacks=asked.attacks[:1], selections=("random",))
    found: list[Cell] = []
    for cell in selection_cells(source, asked):
        found += [cell] if cell.method == BASE else _levels(cell, levels)
    return found


def with_levels(inputs: Inputs, asked: Asked, seed: int, levels: int, folder: Path) -> Inputs:
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
        write_aside(pools[name], "".join(f"{lines[i]}\n" for i in rows))
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


def distributions(place: Workplace, asked: Asked) -> dict[str, list[tuple[float, float, int]]]:
    """Return the distribution of q in every requested pool, at the first seed and attack."""
    seed = asked.seeds[0]
    inputs = place.source.make(seed, place.split)
    found: Sequence[tuple[str, Tensor]] = [
        (pool, pool_quality(inputs, asked.attacks[0], pool, seed, place.folder)) for pool in asked.pools
    ]
    return {pool: histogram(q_N) for pool, q_N in found}
