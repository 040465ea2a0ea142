"""A job in its child: the stages of `spard.pipeline` on a job's folder, and for other ranks their part in training."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from spard import distributed
from spard.config.patience import Patience
from spard.digests import file_sha256
from spard.errors import Stopped
from spard.evaluation.contamination import refuse_leaks
from spard.evaluation.scorers.sandbox import refuse_programs
from spard.models.base import Base, load_base
from spard.pipeline import train
from spard.pipeline.context import CheckpointPlan, Context
from spard.pipeline.outputs import OutputsInFolder
from spard.pipeline.package import Release
from spard.pipeline.rows import prepare
from spard.pipeline.stages import run_stages
from spard.release.proof import CleanProcess
from worker.cache import FolderCache
from worker.distributed import leaving_word, partners
from worker.protocol import Report
from worker.workdir import Assignment, Folder, read_assignment

_SMALL = 20_000_000  # parameters


def run(folder: Folder, report: Report, should_stop: Callable[[], bool], clean: CleanProcess | None = None) -> None:
    """Do the job that the folder describes, and leave its results there. `clean` was started before; else it is now."""
    assignment = read_assignment(folder)
    release = Release(
        folder.out,
        job_id=assignment.job_id,
        waived=assignment.waived,
        keeps_failed=assignment.holds,
        provenance=assignment.provenance,
    )
    refuse_programs(assignment.run)
    if not assignment.waived:
        refuse_leaks(assignment.run)
    with clean or CleanProcess() as process:
        context = _context(assignment, folder, report, should_stop)
        together = partial(partners, folder, assignment.processes, context.base.device, report)
        run_stages(context, release, process, together)


def take_part(folder: Folder, report: Report, rank: int, count: int) -> None:
    """Train with the process that runs the job: on the same data, in the same steps."""
    context = _context(read_assignment(folder), folder, report, lambda: False)
    rows = prepare(context)
    with distributed.joined(folder.meeting, rank, count, context.base.device), leaving_word(folder), suppress(Stopped):
        train.run(context, rows)


def _context(assignment: Assignment, folder: Folder, report: Report, should_stop: Callable[[], bool]) -> Context:
    base = load_base(assignment.run.model, assignment.run.revision, sha256=partial(_sha256, assignment.weights))
    _set_threads(base)
    return Context(
        assignment.run,
        base,
        report,
        OutputsInFolder(folder.stage),
        FolderCache(assignment.cache_dir),
        folder.resume_states,
        should_stop,
        assignment.processes,
        Patience(assignment.patience_s),
        _checkpoints(assignment, folder),
        assignment.keeps_transcripts,
    )


def _sha256(told: Mapping[str, str], path: Path) -> str:
    """Return the digest of a model's file as the worker has told it, else from its bytes."""
    return told.get(path.name) or file_sha256(path)


def _checkpoints(assignment: Assignment, folder: Folder) -> CheckpointPlan | None:
    prompts = assignment.checkpoint_prompts
    return None if prompts is None else CheckpointPlan(folder.epochs, prompts, assignment.taken_until)


def _set_threads(base: Base) -> None:
    """One thread for a model so small that sharing its work costs more than it gives, unless the provider says else."""
    is_small = base.device.type == "cpu" and base.model.num_parameters() < _SMALL
    if is_small and "SPARD_WORKER_THREADS" not in os.environ:
        torch.set_num_threads(1)
