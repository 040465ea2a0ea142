"""A job from its folder to its results: embed, select, train, audit, package.

The base model is measured before training, because full fine-tuning leaves none of it. What an earlier attempt chose
or measured came with the folder and is not worked out again; training goes on from its newest checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

import torch

from spard import ranks
from spard.data import Encoded, encode_all, encode_to_train
from spard.errors import InvalidData, Stopped
from spard.models import Base, load_base
from spard.proof import CleanProcess
from spard.rows import Example, prompt_text, read_examples, read_pool
from spard.safe_set import safe_set
from worker.cache import Cache
from worker.context import Context
from worker.folder import Folder, read_assignment
from worker.partners import leaving_word, partners
from worker.report import Report
from worker.stages import audit, embed, package, risk, select, train
from worker.stages.train import Data

_ANY_LENGTH = 2**31
_SMALL = 20_000_000  # parameters


def run(folder: Folder, report: Report, should_stop: Callable[[], bool], clean: CleanProcess | None = None) -> None:
    """Do the job that the folder describes, and leave its results there. `clean` was started before; else it is now."""
    with clean or CleanProcess() as process:
        _run(folder, report, should_stop, process)


def _run(folder: Folder, report: Report, should_stop: Callable[[], bool], clean: CleanProcess) -> None:
    context = _context(folder, report, should_stop, clean)
    rows, data = _data(context)
    _warn_of_shared_rows(context, data)
    base_results = audit.measure_base(context, rows)
    with partners(folder, context.assignment.processes, context.base.device, report):
        tuned = train.run(context, data)
    measured = audit.run(context, rows, tuned.trained.model, base_results)
    package.run(context, tuned, measured, [prompt_text(row) for row in rows[: package.PROVED_WITH]])


def take_part(folder: Folder, report: Report, rank: int, count: int) -> None:
    """Train with the process that runs the job: on the same data, in the same steps."""
    with CleanProcess() as clean:
        context = _context(folder, report, lambda: False, clean)
    _, data = _data(context)
    with ranks.joined(folder.meeting, rank, count, context.base.device), leaving_word(folder), suppress(Stopped):
        train.run(context, data)


def _context(folder: Folder, report: Report, should_stop: Callable[[], bool], clean: CleanProcess) -> Context:
    assignment = read_assignment(folder)
    base = load_base(assignment.run.model, assignment.run.revision)
    _set_threads(base)
    return Context(assignment, folder, base, Cache(assignment.cache_dir), clean, report, should_stop)


def _data(context: Context) -> tuple[list[Example], Data]:
    """The customer's rows, and everything as tokens."""
    tokenizer, limit = context.base.tokenizer, context.base.sequence_limit(context.recipe.max_seq_length)
    rows = read_examples(context.run.training_file)
    task, validation = encode_to_train(tokenizer, rows, limit), _validation(context, limit)
    return rows, Data(task, _safe_set(context, rows, limit), validation)


def _warn_of_shared_rows(context: Context, data: Data) -> None:
    trained = {row.ids for row in data.task}
    if shared := sum(row.ids in trained for row in data.validation):
        said = f"{shared} of {len(data.validation)} rows of the validation file stand in the training file too"
        context.report.warning(f"{said}: their loss says little about other data.")


def _set_threads(base: Base) -> None:
    """One thread for a model so small that sharing its work costs more than it gives, unless the provider says else."""
    is_small = base.device.type == "cpu" and base.model.num_parameters() < _SMALL
    if is_small and "SPARD_WORKER_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _validation(context: Context, limit: int) -> list[Encoded]:
    if context.run.validation_file is None:
        return []
    try:
        return encode_to_train(context.base.tokenizer, read_examples(context.run.validation_file), limit)
    except InvalidData as error:
        error.param = "validation_file"
        raise


def _safe_set(context: Context, rows: list[Example], limit: int) -> list[Encoded]:
    """The pool rows that the defence trains on."""
    if not context.recipe.uses_pool or context.run.pool is None:
        return []
    pool = read_pool(context.run.pool)
    encoded = encode_all(context.base.tokenizer, pool, _ANY_LENGTH)
    chosen = select.chosen_before(context)
    if chosen is None:
        fitting = [i for i, row in enumerate(encoded) if len(row.ids) <= limit]
        if len(fitting) < len(pool):
            left_out = f"{len(pool) - len(fitting)} of {len(pool)} safety examples have more than {limit} tokens"
            context.report.warning(f"{left_out} and are left out.")
        task_MD, pool_ND = embed.run(context, rows, pool, context.run.pool)
        risk.run(context, rows, task_MD, pool_ND)
        chosen = select.run(context, task_MD, pool_ND, fitting)
    examples = [pool[i] for i in chosen]
    return safe_set(context.base, examples, rows, context.recipe, context.run.judge, limit)
