"""The rows of a run as tokens: the training file, the validation file and the selected rows of the safety pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spard.data.chat import UNBOUNDED, Encoded, encode_all, encode_to_train
from spard.data.rows import Example, read_examples, read_pool
from spard.errors import InvalidData, InvalidPool, raised_as
from spard.evaluation.judges import of_base_model
from spard.pipeline import embed, select
from spard.pipeline.context import Context
from spard.pipeline.safe_set import safe_set
from spard.release.report import SelectedRows


@dataclass(frozen=True, slots=True)
class Rows:
    """What a run trains on and validates with; `examples` are the training file before it became `task`."""

    examples: Sequence[Example]
    task: Sequence[Encoded]
    safe: Sequence[Encoded]
    validation: Sequence[Encoded]
    selected: SelectedRows | None


def prepare(context: Context) -> Rows:
    """Read and check every file, and select the safe set; whatever cannot be trained on raises before anything costly.

    Raises `InvalidData`: a row cannot be read, has too many tokens, or none to learn.
    """
    tokenizer, limit = context.base.tokenizer, context.limit
    examples = read_examples(context.run.training_file)
    task, validation = encode_to_train(tokenizer, examples, limit), _validation(context)
    selected, safe = _safe_rows(context, examples)
    _warn_of_shared_rows(context, task, validation)
    return Rows(examples, task, safe, validation, selected)


def _validation(context: Context) -> list[Encoded]:
    if context.run.validation_file is None:
        return []
    try:
        return encode_to_train(context.base.tokenizer, read_examples(context.run.validation_file), context.limit)
    except InvalidData as error:
        error.param = "validation_file"
        raise


def _safe_rows(context: Context, examples: Sequence[Example]) -> tuple[SelectedRows | None, list[Encoded]]:
    """Select the pool rows that the method trains on, if it does; an earlier attempt's choice stands."""
    if not context.recipe.uses_pool or context.run.pool is None:
        return None, []
    pool = read_pool(context.run.pool)
    selected = select.kept(context) or _select(context, examples, pool, context.run.pool)
    chosen = [pool[i] for i in selected.indices]
    with of_base_model(context.run.model, context.run.revision):
        safe = safe_set(context.base, chosen, examples, context.recipe, context.run.judge, context.limit)
    return selected, safe


def _select(context: Context, examples: Sequence[Example], pool: Sequence[Example], pool_file: Path) -> SelectedRows:
    with raised_as(InvalidPool):
        encoded = encode_all(context.base.tokenizer, pool, UNBOUNDED)
    fitting = [i for i, row in enumerate(encoded) if len(row.ids) <= context.limit]
    if len(fitting) < len(pool):
        left_out = f"{len(pool) - len(fitting)} of {len(pool)} safety examples have more than {context.limit} tokens"
        context.report.warning(f"{left_out} and are left out.")
    task_MD, pool_ND = embed.run(context, examples, pool, pool_file)
    select.rank_risks(context, examples, task_MD, pool_ND)
    return select.run(context, task_MD, pool_ND, fitting)


def _warn_of_shared_rows(context: Context, task: Sequence[Encoded], validation: Sequence[Encoded]) -> None:
    trained = {row.ids for row in task}
    if shared := sum(row.ids in trained for row in validation):
        said = f"{shared} of {len(validation)} rows of the validation file stand in the training file too"
        context.report.warning(f"{said}: their loss says little about other data.")
