"""The package stage: the papers of a job, and the adapter's archive if it may leave the house."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spard.adapters import archive, save_adapter
from spard.checkpoint import file_sha256
from spard.methods.ptst import serving_prompt
from spard.package import Measured, metrics_csv, safety_report, trigger_rate
from spard.recipe import to_mapping
from worker.context import Context
from worker.stages import risk
from worker.stages.select import written
from worker.stages.train import Tuned
from worker.summary import sentence, summary

RELEASED = ("pass", "waived")


def run(context: Context, tuned: Tuned, measured: Measured) -> None:
    """Write metrics and report always, the archive only when the gate passed or was waived."""
    decision = "waived" if context.assignment.waived else measured.gate.decision
    figures = summary(measured)
    context.report.event(sentence(figures, decision), figures, type="moderation_checks")
    context.report.phase("package")
    with context.stage("package"):
        facts = _facts(context, tuned)
        report = safety_report(measured, facts) | figures | {"seconds": context.seconds, "selected": written(context)}
        report["risky_rows"] = risk.written(context)
        report["gate"]["decision"] = decision
        context.folder.metrics.write_text(metrics_csv(tuned.trained.metrics, tuned.after))
        context.folder.safety.write_text(json.dumps(report, indent=2) + "\n")
        if decision in RELEASED:
            _pack(context, tuned.trained.model, facts | {"safety_sha256": file_sha256(context.folder.safety)})


def _facts(context: Context, tuned: Tuned) -> dict[str, Any]:
    """What the numbers depend on, and what training itself measured."""
    run = context.run
    files = {"training": run.training_file, "validation": run.validation_file, "pool": run.pool}
    return {
        "job_id": context.assignment.job_id,
        "base_model": run.public_name,
        "base_digest": context.base.digest,
        "recipe": to_mapping(run.recipe),
        "resolved": asdict(tuned.resolved),
        "thresholds": asdict(run.thresholds),
        "data_sha256": {name: file_sha256(path) for name, path in files.items() if path},
        "trained_tokens": tuned.trained.trained_tokens,
        "steps": tuned.trained.steps,
        "tau": tuned.trained.tau,
        "trigger_rate": trigger_rate(tuned.trained.metrics),
        "validation": {
            name: {"loss": found.loss, "accuracy": found.accuracy, "tokens": found.tokens}
            for name, found in (("base", tuned.before), ("adapter", tuned.after))
            if found
        },
    }


def _pack(context: Context, model: Any, facts: dict[str, Any]) -> None:
    folder: Path = context.folder.out / "adapter"
    public, system = context.run.public_name or "base", serving_prompt(context.recipe.defense)
    save_adapter(model, context.base.tokenizer, public, folder, facts, system)
    archive(folder, context.folder.archive)
    shutil.rmtree(folder)
