"""The select stage: the safe set, and beside it the training rows that look most like harm.

Both are worked out once for a run and kept for its later attempts. Whose answers the safe rows have is kept here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from spard.config.run_spec import to_mapping
from spard.data.rows import Example
from spard.errors import InvalidPool
from spard.evaluation.row_risk import center, rank
from spard.pipeline.context import Context
from spard.pipeline.row_judging import Flagged
from spard.release.figure_records import RowsMap
from spard.release.report import SelectedRows, read_record
from spard.release.row_records import RiskyRow, SafeAnswers
from spard.selection.pca import coordinates
from spard.selection.relevance import Nearest, ToTask, read
from spard.selection.select import Chosen, choose
from spard.selection.shards import Frame, Framed, Vectors

_SELECTED, _BENIGN, _RISKS, _ANSWERS, _MAP = "select", "select_benign", "risk", "answers", "rows_map"
_MAPPED = 300  # rows of each sort
_MOST = 0.75  # of what was chosen


@dataclass(frozen=True, slots=True)
class Near:
    """The relevance of the pool to the rows that are trained on, and of each training row to the pool.

    The former is seen as the embedder's frame has it, the latter from the mean of all embeddings. With each cosine
    stands the row of the other side.
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
    """Read the pool once for all that is asked of each of its rows; `trained` are the places that are trained on.

    The relevance to these is seen in `frame`, where there is one.
    """
    with context.time_stage("select"):
        own_MD, pool = center(task_MD, pool_ND, pool_sum_D)
        seen = frame.project if frame else _as_they_are
        viewed = Framed(pool_ND, frame) if frame else pool_ND
        to_task, nearest = ToTask(viewed, seen(task_MD[list(trained)])), Nearest(own_MD)
        read(
            pool_ND,
            lambda rows, x_BD: to_task.see(rows, seen(x_BD)),
            lambda rows, x_BD: nearest.see(rows, pool.project(x_BD)),
        )
        return Near(to_task.result(), nearest.result(pool))


def _as_they_are(x_BD: Tensor) -> Tensor:
    return x_BD


def run(
    context: Context, task_MD: Tensor, pool_ND: Vectors, near: Near, too_long: Callable[[Sequence[int]], Sequence[int]]
) -> SelectedRows:
    """Choose safe rows from the pool, leaving out those that `too_long` names; store the choice with its reasons.

    `too_long` is called with the chosen rows only, since a row that the greedy choice has not taken does not change it;
    with all rows where most of the chosen ones are too long. Raise `InvalidPool` if every row is too long.
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
) -> Chosen:
    selection = context.recipe.selection
    k = selection.size(len(task_MD), len(pool_ND) if among is None else len(among))
    return choose(pool_ND, task_MD, k, selection, context.recipe.seed, among, near.to_task)


def benign(context: Context, task_MD: Tensor, benign_ND: Vectors) -> list[int]:
    """Choose from the pool's benign rows as from its safe ones, and keep which; none where the pool has none."""
    with context.time_stage("select"):
        selection = context.recipe.selection
        k = selection.size(len(task_MD), len(benign_ND))
        found = choose(benign_ND, task_MD, k, selection, context.recipe.seed).indices if len(benign_ND) else []
        context.outputs.write(_BENIGN, found)
    text = f"Selected {len(found)} of {len(benign_ND)} benign prompts"
    context.report.event(text, {"selected": len(found), "pool": len(benign_ND)})
    return found


def kept_benign(context: Context) -> list[int]:
    """Return the benign rows that were chosen by this attempt or an earlier one."""
    found: list[int] | None = context.outputs.read(_BENIGN)
    return found or []


def read_selected(context: Context) -> SelectedRows | None:
    """Return what an earlier attempt chose."""
    found = context.outputs.read(_SELECTED)
    return None if found is None else read_record(SelectedRows, found)


def keep_answers(context: Context, found: SafeAnswers) -> None:
    """Keep whose answers the safe rows have, and tell it."""
    context.outputs.write(_ANSWERS, to_mapping(found))
    whose = "the base model's own" if found.taken == "self" else "the pool's"
    text = f"The safe rows have {whose} answers; {found.own} of {found.rows} prompts have a harmless answer of its own"
    context.report.event(text, to_mapping(found))


def kept_answers(context: Context) -> SafeAnswers | None:
    """Return whose answers the safe rows have; None where the recipe says that they are the pool's."""
    found = context.outputs.read(_ANSWERS)
    return None if found is None else read_record(SafeAnswers, found)


def rank_risks(
    context: Context,
    examples: Sequence[Example],
    task_MD: Tensor,
    pool_ND: Vectors,
    near: Near,
    flagged: Sequence[Flagged],
) -> None:
    """Rank the training rows by how much they look like harm, from the embeddings that are there anyway.

    `flagged` are those that the base model would refuse, with the judge's verdicts, and those that the judge found.
    """
    with context.time_stage("select"):
        refused = {each.line: each.probability for each in flagged if each.by_base}
        verdicts = {each.line: each.verdict for each in flagged}
        excused = {each.line for each in flagged if each.is_excused}
        risks = rank(
            *(examples, task_MD, pool_ND), flagged=refused, near=near.to_pool, verdicts=verdicts, excused=excused
        )
        context.outputs.write(_RISKS, to_mapping(risks))


def keep_map(context: Context, lines: Sequence[int], task_MD: Tensor, pool_ND: Vectors, selected: SelectedRows) -> None:
    """Keep where training rows, pool and chosen rows lie in one plane, from the embeddings that are there anyway.

    `lines` are those of the training rows in their file.
    """
    with context.time_stage("select"):
        rows, pool = _evenly_spaced(len(task_MD)), _evenly_spaced(len(pool_ND))
        chosen = list(selected.indices[:_MAPPED])
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
    """Return where the rows lie; None where nothing was embedded, or an earlier version did it."""
    found = context.outputs.read(_MAP)
    return None if found is None else read_record(RowsMap, found)


def _evenly_spaced(count: int) -> list[int]:
    """Return at most so many places as are mapped, evenly spaced."""
    n = min(count, _MAPPED)
    return [i * count // n for i in range(n)]


def kept_risks(context: Context) -> tuple[RiskyRow, ...] | None:
    """Return the ranking; None where nothing was embedded, since there is no safety pool."""
    found = context.outputs.read(_RISKS)
    return None if found is None else tuple(read_record(RiskyRow, each) for each in found)
