"""The memory plan of a run: made before the first step on a GPU, reported as an event, stored in the manifest.

On a CPU there is no plan, and the recipe's own settings apply.
"""

from __future__ import annotations

import os
from dataclasses import replace

from spard import distributed
from spard.config import Recipe, Resolved
from spard.methods import open_method
from spard.models import budget
from spard.models.fit import Gpus, Load, Plan, fit
from spard.models.layout import inspect_layout
from spard.models.memory import Trained
from spard.models.shapes import read_model_shape
from spard.pipeline.context import Context
from spard.pipeline.rows import Rows


def plan_memory(context: Context, rows: Rows, resolved: Resolved) -> Plan | None:
    """Return the memory plan for the run's GPUs, and report it; None without a GPU or for an unknown architecture."""
    gpus = run_gpus(context)
    shape = read_model_shape(context.base.model.config.to_dict(), inspect_layout(context.base.model))
    if gpus is None or shape is None:
        return None
    plan = fit(shape, Trained.from_recipe(context.recipe), _load(context.recipe, rows, resolved), gpus)
    context.report.event(plan.sentence, plan.to_json(), level="info" if plan.fits else "warn")
    return plan


def apply_plan(recipe: Recipe, plan: Plan | None) -> Recipe:
    """Return the recipe with the plan's settings; a setting of the recipe or provider that takes less memory wins."""
    asked = recipe.pass_tokens, budget.told_tokens(), None if plan is None else plan.pass_tokens
    tokens = [most for most in asked if most is not None]
    if plan is None:
        return replace(recipe, pass_tokens=min(tokens, default=None))
    pieces = [rows for rows in (recipe.micro_batch_size, plan.micro_batch_size) if rows is not None]
    return replace(
        recipe,
        gradient_checkpointing=recipe.gradient_checkpointing or plan.gradient_checkpointing,
        micro_batch_size=min(pieces, default=None),
        pass_tokens=min(tokens, default=None),
    )


def run_gpus(context: Context) -> Gpus | None:
    """Return the GPUs of the run, with the free memory of the fullest one; None on a CPU."""
    if context.base.device.type != "cuda":
        return None
    memory = min(distributed.gather_objects(budget.own_memory(context.base.device)))  # all ranks need the same plan
    sharding, count = context.recipe.sharding, context.processes
    machines = count // int(os.environ.get("LOCAL_WORLD_SIZE", count)) if sharding == "hybrid" else 1
    return Gpus(memory, count, machines, shards="never" if sharding == "none" else "always")


def _load(recipe: Recipe, rows: Rows, resolved: Resolved) -> Load:
    """Return the largest load of one training step."""
    prompts = [prompt for pairs in rows.pairs.values() for pair in pairs for prompt in pair]
    safe = max((row.longest for row in rows.safe), default=0)
    batch = open_method(recipe.defense).safe_batch_size(resolved.batch_size)
    return Load(
        rows=resolved.batch_size,
        longest=max([row.longest for row in rows.task] + [len(prompt.ids) for prompt in prompts] + [safe]),
        safe_tokens=min(batch, len(rows.safe)) * safe,
        answers=2 if recipe.dpo else 1,
        checkpointing=recipe.gradient_checkpointing,
    )
