"""Run the stages of `spard.pipeline` on a job's folder; called by the child, or by each of its ranks.

Embeddings of pools and audits of base models are kept between jobs in the machine's cache. The name of an entry's file
is the digest of everything that its content depends on. It is written to a temporary file and renamed, so two jobs may
write the same entry. It stores the digest of its content; an entry whose digest does not match is computed again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spard import distributed
from spard.config.patience import Patience
from spard.data.chat import fix_rendering, get_renderer
from spard.data.rendering import read_rendering
from spard.digests import file_sha256, model_file_name
from spard.errors import InvalidModel
from spard.evaluation.judges import use_chat
from spard.evaluation.scorers import refuse_programs
from spard.evaluation.suites import refuse_leaks
from spard.models import budget
from spard.models.adapters import tensor_digest
from spard.models.base import Base, load_base
from spard.models.devices import is_small
from spard.pipeline import stages
from spard.pipeline.context import CheckpointPlan, Context, OutputsInFolder
from spard.pipeline.package import Release
from spard.pipeline.stages import run_stages
from spard.release.proof import CleanProcess
from worker.failures import GpuMissing
from worker.judge_calls import Asking, judge_endpoints
from worker.preloaded_model import Holder
from worker.protocol import Report, prefetch_key
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
        stages.run_later_audit(context, folder.start, folder.later_audit)
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


class FolderCache:
    """A cache in a folder, which may be deleted at any time.

    `tell` is called for each tensor that is returned, with its path below the folder, and True if it was just computed.
    """

    def __init__(self, folder: Path, tell: Callable[[str, bool], None] = lambda entry, made: None) -> None:
        self._folder, self._tell = folder, tell

    def tensor(self, kind: str, key: Mapping[str, Any], make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor cached under `key`, or call `make` and cache its result if the file is missing or damaged.

        The tensor is memory-mapped from the file, unless the file could not be written.
        """
        path = self._path(kind, key, "safetensors")
        found = _read_tensor(path)
        made = found is None
        if found is None:
            rows = {"rows": make()}
            _write(path, partial(save_file, rows, metadata={"sha256": tensor_digest(rows)}))
            found = _read_tensor(path)  # map the file, so that the computed copy can leave the memory
            if found is None:
                return rows["rows"]
        self._tell(path.relative_to(self._folder).as_posix(), made)
        return found

    def json(self, kind: str, key: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """Return the JSON value cached under `key`, or call `make` and cache its result."""
        path = self._path(kind, key, "json")
        found = _read_json(path)
        if found is None:
            found = make()
            text = json.dumps(found)
            entry = json.dumps({"sha256": _file_sha256(text), "content": text})
            _write(path, lambda aside: aside.write_text(entry))
        return found

    def claim(self, kind: str, key: Mapping[str, Any]) -> AbstractContextManager[object] | None:
        """Lock an entry while it is computed; return None while another process holds the lock.

        The lock is released by closing the returned context, or by the kernel when the process ends. Where files cannot
        be locked the returned context locks nothing: two jobs may then compute the same entry, which is harmless.
        """
        path = self._path(kind, key, "claim")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("ab")
        except OSError as error:
            log.warning("not claimed: %s", error)
            return nullcontext()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError as error:
            log.warning("not claimed: %s", error)
        return file

    def _path(self, kind: str, key: Mapping[str, Any], suffix: str) -> Path:
        return self._folder / kind / f"{_file_sha256(json.dumps(dict(key), sort_keys=True))}.{suffix}"


def _read_tensor(path: Path) -> Tensor | None:
    try:
        with safe_open(path, framework="pt") as file:
            rows: Tensor = file.get_tensor("rows")
            if file.metadata()["sha256"] == tensor_digest({"rows": rows}):
                return rows
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        log.warning("the cached %s cannot be read: %s", path.name, error)
        return None
    log.warning("the cached %s is damaged", path.name)
    return None


def _read_json(path: Path) -> Any:
    try:
        entry = json.loads(path.read_text())
        if _file_sha256(entry["content"]) == entry["sha256"]:
            return json.loads(entry["content"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("the cached %s cannot be read: %s", path.name, error)
        return None
    log.warning("the cached %s is damaged", path.name)
    return None


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write a cache entry; a failure costs time, not the job."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, prefix=".aside-", delete=False) as file:
            aside = Path(file.name)
        try:
            write(aside)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        log.warning("not cached: %s", error)


def _file_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
