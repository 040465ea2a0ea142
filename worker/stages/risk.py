"""Beside the select stage: the customer's rows that look most like harm, from the embeddings that are there anyway."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from spard.risk import rank
from spard.rows import Example
from worker.context import Context

_OUTPUT = "risk.json"


def run(context: Context, rows: Sequence[Example], task_MD: Tensor, pool_ND: Tensor) -> None:
    """Rank the rows; which ones and why is written down."""
    with context.stage("select"):
        risks = [asdict(risk) for risk in rank(rows, task_MD, pool_ND)]
        (context.folder.stage / _OUTPUT).write_text(json.dumps(risks))


def written(context: Context) -> list[dict[str, Any]] | None:
    """The ranking, where there is one: without a safety pool nothing is embedded."""
    output = context.folder.stage / _OUTPUT
    if not output.exists():
        return None
    found: list[dict[str, Any]] = json.loads(output.read_text())
    return found
