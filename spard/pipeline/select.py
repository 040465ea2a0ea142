"""The select stage: chooses the safe set and ranks the training rows that look most like harm.

Both are computed once per run and stored for later attempts, together with the source of the safe rows' answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from spard.config.run_spec import to_mapping
from spard.data.rows import Example
from spard.errors import InvalidPool
from spard.evaluation.row_risk import center, rank
from spard.pipeline.context import Context
from spard.pipeline.row_judging import FlaggedRow
from spard.release.figures import RowsMap
from spard.release.records import RiskyRow, SafeAnswers
from spard.release.report import SelectedRows, read_record
from spard.selection.relevance import Nearest, ToTask, coordinates, read
from spard.selection.select import PoolSelection, choose
from spard.selection.shards import Frame, FramedVectors, Vectors

_SELECTED, _BENIGN, _RISKS, _ANSWERS, _MAP = "select", "select_benign", "risk", "answers", "rows_map"
_MAPPED = 300  # maximum rows of each kind on the map
_MOST = 0.75  # share of too long rows above which the whole pool is checked


@dataclass(frozen=True, slots=True)
class Near:
    """Cosines between pool and training rows, each with the position of the nearest row on the other side.

    to_task  for each pool row, its relevance to the trained rows, in the embedder's frame
    to_pool  for each training row, its similarity to the pool after removing the mean of all embeddings
    """

    to_task: tuple[Tensor, Tensor]
    to_pool: tuple[Tensor, Tensor]


def look(
    context: Context,
    task_MD: Tensor,
    trained: Sequence[int],
    pool_ND: Vectors,
    pool_sum_D: Tensor,
    frame: Frame | None = None,
) -> Near:
    """Read the pool's embeddings once and return all similarities between its rows and the training rows.

    `task_MD` are the embeddings of all training rows `[M, D]`, `trained` the positions of the trained ones, `pool_ND`
    the pool's embeddings `[N, D]` and `pool_sum_D` their sum. `frame`, if given, is applied for the relevance.
    """
    with context.time_stage("select"):
        # Both similarities are computed in one pass, because a large pool does not fit in memory and each pass reads it
        # all.
        own_MD, pool = center(task_MD, pool_ND, pool_sum_D)
        seen = frame.project if frame else _as_they_are
        viewed = FramedVectors(pool_ND, frame) if frame else pool_ND
        to_task, nearest = ToTask(viewed, seen(task_MD[list(trained)])), Nearest(own_MD)
        doing = f"comparing {len(pool_ND):,} rows of the safety pool with the training rows"
        context.report.activity(doing, 0, len(pool_ND))
        read(
            pool_ND,
            lambda rows, x_BD: to_task.see(rows, seen(x_BD)),
            lambda rows, x_BD: nearest.see(rows, pool.project(x_BD)),
            lambda rows, x_BD: context.report.activity(doing, rows.stop, len(pool_ND)),
        )
        return Near(to_task.result(), nearest.result(pool))


def _as_they_are(x_BD: Tensor) -> Tensor:
    return x_BD


def run(
    context: Context, task_MD: Tensor, pool_ND: Vectors, near: Near, too_long: Callable[[Sequence[int]], Sequence[int]]
) -> SelectedRows:
    """Choose safe rows from the pool without rows that are too long; store and return the choice with its reasons.

    `too_long` returns the given rows that exceed the token limit. It is called with the chosen rows only, because a row
    that the greedy choice has not taken cannot change the choice; if most of the chosen rows are too long, it is called
    with all rows. Raises `InvalidPool` if every row is too long.
    """
    context.report.stage("select")
    with context.time_stage("select"):
        left_out: set[int] = set()
        while True:
            among = [i for i in range(len(pool_ND)) if i not in left_out] if left_out else None
            chosen = _choose_rows(context, task_MD, pool_ND, near, among)
            long = too_long(chosen.indices)
            if not long:
                break
            # A pool of mostly long rows needs many rounds of choosing and dropping; one tokenization of the whole pool
            # is faster.
            if len(long) > _MOST * len(chosen.indices):
                long = too_long(range(len(pool_ND)) if among is None else among)
            left_out.update(long)
            if len(left_out) == len(pool_ND):
                raise InvalidPool(f"every safe row of the safety pool has more than {context.limit} tokens")
        facts = asdict(chosen) | {"coordinates": coordinates(pool_ND[chosen.indices])}
        selected = read_record(SelectedRows, facts)
        context.outputs.write(_SELECTED, to_mapping(selected))
    if left_out:
        told = f"At least {len(left_out)} of {len(pool_ND)} safety examples"
        context.report.warning(f"{told} have more than {context.limit} tokens; they are left out.")
    rows = len(pool_ND) - len(left_out)
    text = f"Selected {len(chosen.indices)} of {rows} safety examples"
    context.report.event(text, {"selected": len(chosen.indices), "pool": rows, "rank": chosen.rank})
    return selected


def _choose_rows(
    context: Context, task_MD: Tensor, pool_ND: Vectors, near: Near, among: Sequence[int] | None
) -> PoolSelection:
    selection = context.recipe.selection
    k = selection.size(len(task_MD), len(pool_ND) if among is None else len(among))
    tell = partial(context.report.activity, f"choosing {k:,} of {len(pool_ND):,} safe rows")
    tell(0, k)
    return choose(pool_ND, task_MD, k, selection, context.recipe.seed, among, near.to_task, tell)


def benign(context: Context, task_MD: Tensor, benign_ND: Vectors) -> list[int]:
    """Choose and store benign rows of the pool, in the same way as safe ones; [] if the pool has none."""
    with context.time_stage("select"):
        selection = context.recipe.selection
        k = selection.size(len(task_MD), len(benign_ND))
        tell = partial(context.report.activity, f"choosing {k:,} of {len(benign_ND):,} benign rows")
        tell(0, k)
        chosen = choose(benign_ND, task_MD, k, selection, context.recipe.seed, tell=tell) if len(benign_ND) else None
        found = chosen.indices if chosen else []
        context.outputs.write(_BENIGN, found)
    text = f"Selected {len(found)} of {len(benign_ND)} benign prompts"
    context.report.event(text, {"selected": len(found), "pool": len(benign_ND)})
    return found


def kept_benign(context: Context) -> list[int]:
    """Return the stored choice of benign rows."""
    found: list[int] | None = context.outputs.read(_BENIGN)
    return found or []


def read_selected(context: Context) -> SelectedRows | None:
    """Return the stored choice of safe rows, or None."""
    found = context.outputs.read(_SELECTED)
    return None if found is None else read_record(SelectedRows, found)


def keep_answers(context: Context, found: SafeAnswers) -> None:
    """Store and report whose answers the safe rows have."""
    context.outputs.write(_ANSWERS, to_mapping(found))
    whose = "the base model's own" if found.taken == "self" else "the pool's"
    text = f"The safe rows have {whose} answers; {found.own} of {found.rows} prompts have a harmless answer of its own"
    context.report.event(text, to_mapping(found))


def kept_answers(context: Context) -> SafeAnswers | None:
    """Return whose answers the safe rows have; None if the recipe says that they keep the pool's answers."""
    found = context.outputs.read(_ANSWERS)
    return None if found is None else read_record(SafeAnswers, found)


def rank_risks(
    context: Context,
    examples: Sequence[Example],
    task_MD: Tensor,
    pool_ND: Vectors,
    near: Near,
    flagged: Sequence[FlaggedRow],
) -> None:
    """Rank the training rows by their similarity to harm, with the existing embeddings, and store the ranking.

    `flagged` are the rows flagged by the base model or found by the judge.
    """
    with context.time_stage("select"):
        context.report.activity("ranking the training rows by their likeness to harm")
        refused = {each.line: each.probability for each in flagged if each.by_base}
        verdicts = {each.line: each.verdict for each in flagged}
        excused = {each.line for each in flagged if each.is_excused}
        risks = rank(
            *(examples, task_MD, pool_ND), flagged=refused, near=near.to_pool, verdicts=verdicts, excused=excused
        )
        context.outputs.write(_RISKS, to_mapping(risks))


def keep_map(context: Context, lines: Sequence[int], task_MD: Tensor, pool_ND: Vectors, selected: SelectedRows) -> None:
    """Store a two-dimensional map of training rows, pool rows and chosen rows, from the existing embeddings.

    `lines` are the training rows' lines in their file.
    """
    with context.time_stage("select"):
        rows, pool = _evenly_spaced(len(task_MD)), _evenly_spaced(len(pool_ND))
        chosen = list(selected.indices[:_MAPPED])
        # One projection of all three groups together, so their points share a plane.
        points = coordinates(torch.cat([task_MD[rows], pool_ND[pool], pool_ND[chosen]]))
        own, rest = points[: len(rows)], points[len(rows) :]
        found = RowsMap(
            lines=tuple(lines[i] for i in rows),
            training=tuple(own),
            pool_rows=tuple(pool),
            pool=tuple(rest[: len(pool)]),
            chosen=tuple(rest[len(pool) :]),
        )
        context.outputs.write(_MAP, to_mapping(found))


def kept_map(context: Context) -> RowsMap | None:
    """Return the stored map; None if nothing was embedded or by an earlier version."""
    found = context.outputs.read(_MAP)
    return None if found is None else read_record(RowsMap, found)


def _evenly_spaced(count: int) -> list[int]:
    """Return at most `_MAPPED` evenly spaced positions."""
    n = min(count, _MAPPED)
    return [i * count // n for i in range(n)]


def kept_risks(context: Context) -> tuple[RiskyRow, ...] | None:
    """Return the stored ranking; None without a safety pool."""
    found = context.outputs.read(_RISKS)
    return None if found is None else tuple(read_record(RiskyRow, each) for each in found)
