"""The rows of a run as tokens: the training file, the validation file and the selected rows of the safety pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spard.config.anchors import Kind
from spard.data.chat import UNBOUNDED, Encoded, encode_all, encode_to_train
from spard.data.rows import Example, read_benign, read_examples, read_pool
from spard.errors import InvalidData, InvalidPool, raised_as
from spard.losses.anchor import Pair
from spard.pipeline import embed, select
from spard.pipeline.anchors import anchored
from spard.pipeline.context import Context
from spard.pipeline.safe_set import safe_set
from spard.release.report import SelectedRows


@dataclass(frozen=True, slots=True)
class Rows:
    """What a run trains on and validates with; `examples` are the training file before it became `task`.

    `pairs` are what the anchor holds beside the plain prompts of `safe`.
    """

    examples: Sequence[Example]
    task: Sequence[Encoded]
    safe: Sequence[Encoded]
    validation: Sequence[Encoded]
    selected: SelectedRows | None
    pairs: Mapping[Kind, Sequence[Pair]] = field(default_factory=dict)


def prepare(context: Context) -> Rows:
    """Read and check every file, and select the safe set; whatever cannot be trained on raises before anything costly.

    Raises `InvalidData`: a row cannot be read, has too many tokens, or none to learn.
    """
    tokenizer, limit = context.base.tokenizer, context.limit
    examples = read_examples(context.run.training_file)
    task, validation = encode_to_train(tokenizer, examples, limit), _validation(context)
    selected, safe, pairs = _safe_rows(context, examples)
    _warn_of_shared_rows(context, task, validation)
    return Rows(examples, task, safe, validation, selected, pairs)


def _validation(context: Context) -> list[Encoded]:
    if context.run.validation_file is None:
        return []
    try:
        return encode_to_train(context.base.tokenizer, read_examples(context.run.validation_file), context.limit)
    except InvalidData as error:
        error.param = "validation_file"
        raise


def _safe_rows(
    context: Context, examples: Sequence[Example]
) -> tuple[SelectedRows | None, list[Encoded], dict[Kind, list[Pair]]]:
    """Select the pool rows that the method trains on, if it does; an earlier attempt's choice stands."""
    if not context.recipe.uses_pool or context.run.pool is None:
        return None, [], {}
    recipe, pool = context.recipe, read_pool(context.run.pool)
    benign = read_benign(context.run.pool) if recipe.uses_benign_rows else []
    if not pool:
        raise InvalidPool("the safety pool has no safe rows")
    if recipe.uses_benign_rows and not benign:
        context.report.warning("The safety pool has no benign rows: the anchor holds safe prompts alone.")
    selected = select.kept(context) or _select(context, examples, pool, benign, context.run.pool)
    chosen = [pool[i] for i in selected.indices]
    safe = safe_set(context.base, chosen, examples, recipe, context.run.judge, context.limit)
    if not recipe.effective_anchor:
        return selected, safe, {}
    held = [benign[i] for i in select.kept_benign(context)] if benign else []
    tokenizer, limit = context.base.tokenizer, context.limit
    return selected, safe, anchored(tokenizer, chosen, held, examples, recipe.anchors, recipe.seed, limit)


def _select(
    context: Context, examples: Sequence[Example], pool: Sequence[Example], benign: Sequence[Example], pool_file: Path
) -> SelectedRows:
    """Select benign rows, if any are wanted, and then safe ones: where these are kept, so are those."""
    with raised_as(InvalidPool):
        encoded = encode_all(context.base.tokenizer, pool, UNBOUNDED)
    fitting = [i for i, row in enumerate(encoded) if len(row.ids) <= context.limit]
    if len(fitting) < len(pool):
        left_out = f"{len(pool) - len(fitting)} of {len(pool)} safety examples have more than {context.limit} tokens"
        context.report.warning(f"{left_out} and are left out.")
    task_MD, pool_ND = embed.run(context, examples, pool, pool_file)
    select.rank_risks(context, examples, task_MD, pool_ND)
    if benign:
        with context.timed("embed"):
            benign_ND = embed.pool(context, benign, pool_file, "benign")
        select.benign(context, task_MD, benign_ND)
    return select.run(context, task_MD, pool_ND, fitting)


def _warn_of_shared_rows(context: Context, task: Sequence[Encoded], validation: Sequence[Encoded]) -> None:
    trained = {row.ids for row in task}
    if shared := sum(row.ids in trained for row in validation):
        said = f"{shared} of {len(validation)} rows of the validation file stand in the training file too"
        context.report.warning(f"{said}: their loss says little about other data.")
