"""Run the stages of `spard.pipeline` on a job's folder; called by the child, or by each of its ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch

from spard import distributed
from spard.config.patience import Patience
from spard.data.chat import fix_rendering, get_renderer
from spard.data.rendering import read_rendering
from spard.digests import file_sha256, model_file_name
from spard.errors import InvalidModel
from spard.evaluation.contamination import refuse_leaks
from spard.evaluation.judges import use_chat
from spard.evaluation.scorers.programs import refuse_programs
from spard.models import budget
from spard.models.base import Base, load_base
from spard.models.devices import is_small
from spard.pipeline import later_audit
from spard.pipeline.context import CheckpointPlan, Context, OutputsInFolder
from spard.pipeline.package import Release
from spard.pipeline.stages import run_stages
from spard.release.proof import CleanProcess
from worker.cache import FolderCache
from worker.failures import GpuMissing
from worker.judge_calls import Asking, judge_endpoints
from worker.preload import prefetch_key
from worker.preloaded_model import Holder
from worker.protocol import Report
from worker.workdir import Assignment, Folder, read_assignment

log = logging.getLogger(__name__)


def run(
    folder: Folder,
    report: Report,
    should_stop: Callable[[], bool],
    clean: CleanProcess | None = None,
    holder: Holder | None = None,
) -> None:
    """Run the job that a folder describes and write its results there.

    `clean` is the process that proves the adapter, if it is already running; else one is started. `holder` may hold the
    base model. With several ranks only rank 0 writes results and has a clean process. Exceptions pass through.
    """
    assignment = read_assignment(folder)
    refuse_programs(assignment.run)
    if assignment.audits:
        context = _context(assignment, folder, report, should_stop, holder)
        later_audit.run(context, folder.start, folder.later_audit)
        return
    release = Release(
        folder.results,
        job_id=assignment.job_id,
        waived=assignment.waived,
        keeps_failed=assignment.holds,
        provenance=assignment.provenance,
    )
    if not assignment.waived:
        refuse_leaks(assignment.run)
    with nullcontext() if distributed.rank() else clean or CleanProcess() as process:
        run_stages(_context(assignment, folder, report, should_stop, holder), release, process)


@contextmanager
def judging(folder: Folder, report: Report, answers: int) -> Iterator[None]:
    """Route questions to the job's judges and agent through the worker, inside the block.

    `answers` is the file descriptor on which the worker writes the answers.
    """
    asking = Asking(report, answers, judge_endpoints(read_assignment(folder).run))
    with use_chat(asking.open):
        yield


def _context(
    assignment: Assignment, folder: Folder, report: Report, should_stop: Callable[[], bool], holder: Holder | None
) -> Context:
    _require_gpu()
    base = (holder.take(prefetch_key(assignment)) if holder else None) or _load_base(assignment)
    _render_as_recorded(base, assignment)
    _set_threads(base)
    budget.set_tokens(assignment.pass_tokens)
    return Context(
        assignment.run,
        base,
        report,
        OutputsInFolder(folder.stage),
        FolderCache(assignment.cache_dir, report.report_cached),
        folder.resume_states,
        should_stop,
        assignment.processes,
        Patience(assignment.patience_s),
        _checkpoints(assignment, folder),
        assignment.keeps_transcripts,
    )


def _render_as_recorded(base: Base, assignment: Assignment) -> None:
    """Fix the chat template's rendering to the catalog's record; raise InvalidModel if the template has changed."""
    if assignment.rendering is None:
        return
    recorded, found = read_rendering(assignment.rendering), get_renderer(base.tokenizer).rendering
    if recorded.template != found.template:
        raise InvalidModel("the base model has another chat template than when it was added; add it again", "model")
    fix_rendering(base.tokenizer, recorded)


def _require_gpu() -> None:
    """Raise `GpuMissing` if `SPARD_DEVICE` is cuda and torch sees no GPU; on a CPU the job can take days."""
    if os.environ.get("SPARD_DEVICE") == "cuda" and not torch.cuda.is_available():
        text = "SPARD_DEVICE is cuda, but torch sees no GPU: it was built for none, or for a newer driver"
        raise GpuMissing(f"{text} than this machine has. This torch is {torch.__version__}.")


def _load_base(assignment: Assignment) -> Base:
    run, sha256 = assignment.run, partial(_sha256, assignment.weights)
    return load_base(
        run.model, run.revision, sharding=run.recipe.sharding, quantization=run.recipe.quantization, sha256=sha256
    )


def _sha256(told: Mapping[str, str], path: Path) -> str:
    """Return the digest of a model's file from the assignment, else compute it from the file."""
    return told.get(model_file_name(path)) or file_sha256(path)


def _checkpoints(assignment: Assignment, folder: Folder) -> CheckpointPlan | None:
    prompts = assignment.checkpoint_prompts
    if prompts is None:
        return None
    kept, shows_last = assignment.kept_checkpoints, folder.audit_last.exists
    return CheckpointPlan(folder.epochs, prompts, assignment.taken_until, kept, shows_last)


def _set_threads(base: Base) -> None:
    """Use one thread for a small model, since more threads slow it down, unless the provider sets a number."""
    if is_small(base.model) and "SPARD_WORKER_THREADS" not in os.environ:
        torch.set_num_threads(1)
