"""The order of the stages, shared by the library's `run` and the service's jobs, on one rank or several.

On several ranks all of them take every step, but rank 0 alone reads stored values and asks external services. What it
has read is broadcast, which makes all ranks take the same path. Every rank writes the same outputs.

A later audit repeats the stage of the current audit on a model that was released before; it trains nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from spard import distributed
from spard.config.run_spec import to_mapping
from spard.data.chat import ask_in_mode, learned_modes
from spard.data.rows import read_examples
from spard.errors import InvalidRecipe
from spard.models.base import load_base
from spard.models.lora import load_adapter_, trainable_model
from spard.models.stored_tokenizer import whole_model_fault
from spard.pipeline import agent, audit, costs, development, evidence, package, task_check, train
from spard.pipeline.audit import leave_out_leaks
from spard.pipeline.base_figures import base_figures
from spard.pipeline.checkpoints import Checkpoints
from spard.pipeline.context import Cache, Context, Outputs
from spard.pipeline.package import Release, audit_figures
from spard.pipeline.rows import prepare
from spard.release.proof import CleanProcess
from spard.release.report import AuditResults, SafetyReport, SelectedRows, summarize
from spard.release.version import code_version
from spard.training import optimizers
from spard.training.train import TrainedModel


def follow_rank_zero(context: Context) -> Context:
    """Return a context whose outputs and cache read the same on all ranks as on rank 0."""
    if distributed.world_size() == 1:
        return context
    return replace(context, outputs=_LedOutputs(context.outputs), cache=_LedCache(context.cache))


class _LedOutputs:
    def __init__(self, inner: Outputs) -> None:
        self._inner = inner

    def read(self, name: str) -> Any | None:
        """Return the value that rank 0 reads."""
        return distributed.broadcast_object(self._inner.read(name) if distributed.rank() == 0 else None)

    def write(self, name: str, value: Any) -> None:
        """Store the value on every rank."""
        self._inner.write(name, value)


class _LedCache:
    """A cache that only rank 0 reads and writes; an entry that it lacks is computed by all ranks together."""

    def __init__(self, inner: Cache) -> None:
        self._inner = inner

    def tensor(self, kind: str, key: Mapping[str, object], make: Callable[[], Tensor]) -> Tensor:
        """Return rank 0's tensor."""
        if distributed.rank():
            _compute_until_done(make)
            return distributed.broadcast_tensor(None)
        # Whether rank 0 must compute is known only inside its cache, so the maker announces a computation (True), and
        # the False below ends the wait of the other ranks in either case.
        found = self._inner.tensor(kind, key, _announce_then_compute(make))
        distributed.broadcast_object(False)
        return distributed.broadcast_tensor(found)

    def json(self, kind: str, key: Mapping[str, object], make: Callable[[], Any]) -> Any:
        """Return rank 0's value."""
        if distributed.rank():
            _compute_until_done(make)
            return distributed.broadcast_object(None)
        found = self._inner.json(kind, key, _announce_then_compute(make))
        distributed.broadcast_object(False)  # ends the other ranks' loop
        return distributed.broadcast_object(found)

    def claim(self, kind: str, key: Mapping[str, object]) -> AbstractContextManager[object] | None:
        """Claim nothing: ranks compute entries together, and a rank that waits for a claim blocks the others."""
        return nullcontext()


def _announce_then_compute(make: Callable[[], Any]) -> Callable[[], Any]:
    """Return a maker for rank 0 that tells the other ranks to compute too, then computes."""

    def compute() -> Any:
        distributed.broadcast_object(True)
        return make()

    return compute


def _compute_until_done(make: Callable[[], Any]) -> None:
    """Compute on a rank other than 0 each time rank 0 announces a computation, until it announces the end."""
    while distributed.broadcast_object(False):
        make()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a run; their files are in the folder of its `Release`."""

    selected: SelectedRows | None
    trained: TrainedModel
    measured: AuditResults
    report: SafetyReport


def run_stages(
    context: Context,
    release: Release,
    clean: CleanProcess | None,
) -> Outcome:
    """Embed, select, train, audit, prove, package.

    The base model is measured before the training, because full fine-tuning leaves none. Stored results of an earlier
    attempt are reused; training resumes from the newest resume state. `clean` is the process that proves the adapter
    and each checkpoint that passed; it loads its libraries while the trained model is audited. All ranks run all
    stages; rank 0, which alone has a clean process, writes the results.

    Raises `InvalidRecipe` for an impossible combination, and the errors of the stages (`spard.errors`).
    """
    optimizers.require(context.recipe)
    _refuse_stored_weights(context)
    _refuse_other_reading(context)
    _refuse_several_ranks(context)
    # From here on all ranks read the same stored outputs, and the audit skips the same prompts.
    context = leave_out_leaks(follow_rank_zero(context))
    with costs.timed_rows(context) as read:
        rows = prepare(context)
        read.append(len(rows.examples))
    evidence.run(context, rows)
    context = evidence.lengthen_audit(context)
    with costs.counted_replies(context, "base_audit"):
        base = base_figures(context, rows.examples)
        compared = development.measure_base(context, rows)
    task_check.ask_base(context, rows.learning)
    with costs.timed_training(context) as trained:
        plan = context.checkpoints
        checkpoints = Checkpoints(context, plan, release, rows, base, clean) if plan else None
        tuned = train.run(context, rows, checkpoints, compared)
        trained.append(tuned.trained)
    task_check.ask_trained(context, rows.learning, tuned.trained.model)
    if clean:
        clean.start()  # not before the training, whose memory it would need
    with costs.counted_replies(context, "audit"):
        measured = audit.run(context, rows.examples, tuned.trained.model, base)
        measured = agent.apply_agent_verdict(context, rows.examples, tuned.trained.model, measured)
    started = time.perf_counter()
    report = package.run(context, release, rows, tuned, measured, clean)
    context.report.cost("package", time.perf_counter() - started, 1)
    return Outcome(rows.selected, tuned.trained, measured, report)


def _refuse_stored_weights(context: Context) -> None:
    """Raise `InvalidRecipe` for full fine-tuning of a model stored in FP8 or MXFP4."""
    if context.recipe.lora is None and context.base.stored:
        message = "lora: the base model is stored in 8 or 4 bits, and its own weights cannot be trained; use LoRA"
        raise InvalidRecipe(message, "lora")


def _refuse_other_reading(context: Context) -> None:
    """Raise `InvalidRecipe` for full fine-tuning of a model whose saved folder transformers would read otherwise."""
    if context.recipe.lora is None and (why := whole_model_fault(context.base.tokenizer)):
        raise InvalidRecipe(f"lora: {why}; use LoRA", "lora")


def _refuse_several_ranks(context: Context) -> None:
    """Raise `InvalidRecipe` for further tuning or an auditing agent on several ranks."""
    asked = {"further_tuning": context.run.further_tuning.steps, "agent": context.run.agent}
    for name, is_asked in asked.items():
        if is_asked and distributed.world_size() > 1:
            raise InvalidRecipe(
                f"{name} is possible on one GPU a job only; this job has {distributed.world_size()}", name
            )


def run_later_audit(context: Context, weights: Path, found: Path) -> AuditResults:
    """Measure the base model and the released one; write the facts as JSON to the file `found` and return the results.

    `weights` is the folder of the unpacked archive. The training file is read only to mine its triggers.
    """
    context, examples = leave_out_leaks(context), read_examples(context.run.training_file)
    # Ask as the original job did: in the mode that most training rows have.
    ask_in_mode(context.base.tokenizer, learned_modes(context.base.tokenizer, examples)[0])
    base = base_figures(context, examples)
    model = _load_released(context, weights)
    measured = agent.apply_agent_verdict(context, examples, model, audit.run(context, examples, model, base))
    summary = summarize(measured)
    context.report.event(summary.sentence(measured.gate.decision), to_mapping(summary), type="moderation_checks")
    facts = {
        "gate": to_mapping(measured.gate),
        "audit_version": audit.audit_version(context),
        "base_digest": context.base.digest,
        "thresholds": to_mapping(context.run.thresholds),
        "judge": context.run.judge.name,
        "audit_engine": to_mapping(measured.engine),
        "asked": audit.audit_coverage(context),
        "audit": audit_figures(measured.base, measured.adapter, measured.after_tuning),
        "agent": to_mapping(measured.agent),
        "code": code_version(),
    }
    found.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")
    return measured


def _load_released(context: Context, weights: Path) -> Any:
    """Return the released model: the base model with its adapter, or fully fine-tuned weights of its own."""
    if context.recipe.lora is None:
        return load_base(weights).model.requires_grad_(True)
    model = trainable_model(context.base.model, context.recipe)
    load_adapter_(model, context.base, context.recipe, weights)
    return model.eval()
