"""The select stage: the safe set, chosen once for a job and kept for its later attempts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from spard.plane import coordinates
from spard.selection import choose
from worker.context import Context

_OUTPUT = "select.json"


def run(context: Context, task_MD: Tensor, pool_ND: Tensor, rows: Sequence[int]) -> list[int]:
    """Choose from the pool rows named by `rows`; which ones and why is written down."""
    context.report.phase("select")
    with context.stage("select"):
        selection = context.recipe.selection
        k = selection.size(len(task_MD), len(rows))
        found = choose(pool_ND[list(rows)], task_MD, k, selection, context.recipe.seed)
        chosen = replace(found, indices=[rows[i] for i in found.indices])
        seen = {"coordinates": coordinates(pool_ND[chosen.indices])}
        (context.folder.stage / _OUTPUT).write_text(json.dumps(asdict(chosen) | seen))
    text = f"Selected {len(chosen.indices)} of {len(rows)} safety examples"
    context.report.event(text, {"selected": len(chosen.indices), "pool": len(rows), "rank": chosen.rank})
    return chosen.indices


def chosen_before(context: Context) -> list[int] | None:
    """What an earlier attempt chose."""
    found = written(context)
    return None if found is None else list(found["indices"])


def written(context: Context) -> dict[str, Any] | None:
    """Which rows were chosen and why, if any were."""
    output = context.folder.stage / _OUTPUT
    if not output.exists():
        return None
    found: dict[str, Any] = json.loads(output.read_text())
    return found
