"""A whole run in this process, from a `RunSpec` to a folder of results: the entry point without the service."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from spard import distributed
from spard.config import AuditEngine, Ending, Evidence, FurtherTuning, RowSignal
from spard.config.run_spec import RunSpec, to_mapping
from spard.config.settings import STATES
from spard.data.chat import fix_template_arguments
from spard.data.template_arguments import argument_fault
from spard.digests import file_sha256
from spard.errors import InvalidRecipe
from spard.evaluation.scorers import refuse_programs
from spard.models.base import Base, load_base
from spard.pipeline.context import Context, begun_identity, open_outputs
from spard.pipeline.messages import Message, Reporter
from spard.pipeline.package import Release
from spard.pipeline.stages import Outcome, run_stages
from spard.release.archive import archive, folder_name
from spard.release.proof import CleanProcess

Report = Callable[[Message], None]  # receives one JSON-able message at a time (`spard.pipeline.messages`)


def run(spec: RunSpec, out: Path, report: Report) -> Outcome:
    """Fine-tune, audit before and after, prove the adapter, and leave all results in the folder `out`.

    Whatever the gate decides, `out` has `adapter/` with its manifest, `adapter.tar.gz`, `metrics.csv` and
    `safety.json`. During the run it also has resume states and the outputs of finished stages: the same call after a
    crash resumes from them. All ranks of a process group must call this function; rank 0 reports and writes. `report`
    receives one JSON-able message at a time (`spard.pipeline.messages`).

        spec = RunSpec("path/to/model", Path("rows.jsonl"), pool=Path("pool.jsonl"))
        outcome = run(spec, Path("out"), print)
        print(outcome.measured.gate.decision)
    """
    spec = _with_asked_suites(spec)
    refuse_programs(spec)
    is_first = distributed.rank() == 0
    with CleanProcess() if is_first else nullcontext() as clean:
        recipe = spec.recipe
        base = load_base(spec.model, spec.revision, sharding=recipe.sharding, quantization=recipe.quantization)
        if fault := argument_fault(base.tokenizer, spec.template_arguments):
            raise InvalidRecipe(f"template_arguments: {fault}", "template_arguments")
        fix_template_arguments(base.tokenizer, spec.template_arguments)
        resume_states, stages = out / "checkpoints", out / "stages"
        reporter = Reporter(report if is_first else _untold)
        spec = _as_begun(spec, base, stages)
        # Opening deletes outputs of another run; rank 0 does so first, and the others find a valid folder.
        outputs = distributed.first_before_others(partial(open_outputs, stages, _identity(spec, base)))
        context = Context(
            spec, base, reporter, outputs, resume_states=resume_states, processes=distributed.world_size()
        )
        outcome = run_stages(context, Release(out, keeps_failed=True, is_timed=False), clean)
    distributed.wait_for_all()
    if not is_first:
        return outcome
    archive(out / "adapter", out / "adapter.tar.gz", folder_name(None))
    # Only a finished run removes its intermediate files: a crash before leaves them for the next call.
    for folder in (resume_states, stages):
        shutil.rmtree(folder, ignore_errors=True)
    context.report.report_done()
    return outcome


def _as_begun(spec: RunSpec, base: Base, stages: Path) -> RunSpec:
    """Return the spec to resume with: the hidden-state embedder if the run was begun by a version without a choice."""
    recipe = spec.recipe
    before = replace(spec, recipe=replace(recipe, selection=replace(recipe.selection, embedder=STATES)))
    is_older = recipe.selection.embedder == "auto" and begun_identity(stages) == _identity(before, base)
    return before if distributed.broadcast_object(is_older) else spec


def _untold(message: Message) -> None:
    """Drop the message: only rank 0 reports."""


def _with_asked_suites(spec: RunSpec) -> RunSpec:
    """Return the spec with only the suites that the recipe names; a recipe without names keeps all."""
    names = spec.recipe.audit.suites
    return replace(spec, suites=tuple(each for each in spec.suites if names is None or each.name in names))


def _identity(spec: RunSpec, base: Base) -> str:
    """Return the digest of all settings and files that decide the outputs of a run's stages.

    Settings added by later versions are left out at their default values, which keeps runs of earlier versions
    resumable.
    """
    named = (spec.training_file, spec.validation_file, spec.pool, *(suite.path for suite in spec.suites))
    files = [file_sha256(path) for path in named if path is not None and path.is_file()]
    asked = to_mapping(spec)
    del asked["recipe"]["sharding"]  # affects numbers only by rounding
    if spec.recipe.quantization == "none":  # runs of earlier versions stay resumable
        del asked["recipe"]["quantization"]
    if spec.row_signal == RowSignal():  # likewise
        del asked["row_signal"]
    if not spec.thresholds.correct_judge_errors:  # likewise
        del asked["thresholds"]["correct_judge_errors"]
    later: dict[str, object] = {
        "further_tuning": FurtherTuning(),
        "agent": None,
        "agent_errors": None,
        "audit_engine": AuditEngine(),
        "held_out_rows": 0,
        "evidence": Evidence(),
        "evidence_references": None,
        "template_arguments": {},
    }
    for name, default in later.items():  # likewise
        if getattr(spec, name) == default:
            del asked[name]
    if spec.recipe.dpo is None:  # likewise
        del asked["recipe"]["dpo"]
    if spec.recipe.ending == Ending():  # likewise
        del asked["recipe"]["ending"]
    if spec.recipe.audit.sequential:  # likewise: the decision equals the whole audit's
        del asked["recipe"]["audit"]["sequential"]
    if spec.recipe.selection.embedder == STATES:  # likewise
        del asked["recipe"]["selection"]["embedder"]
    if (encoder := asked.pop("encoder")) is not None:
        asked["encoder"] = encoder
    facts: list[Any] = [asked, base.digest, files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
