"""The package stage: the papers of a job, and the adapter's folder if it may leave the house."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from spard.adapters import save_adapter
from spard.manifest import file_sha256, write_manifest
from spard.methods.ptst import serving_prompt
from spard.package import Measured, metrics_csv, safety_report, trigger_rate, triggered_steps
from spard.proof import Proof, Source, prove
from spard.recipe import to_mapping
from spard.version import code_version
from worker.context import Context
from worker.pieces import halved_to
from worker.stages import risk
from worker.stages.select import written
from worker.stages.train import Tuned
from worker.summary import sentence, summary

PROVED_WITH = 3  # rows of the training file
RELEASED = ("pass", "waived")
_FIGURES = ("suite", "kind", "judge", "n", "unscored", "hits", "rate", "low", "high", "mean_harmfulness")


def run(context: Context, tuned: Tuned, measured: Measured, prompts: Sequence[str]) -> None:
    """Write metrics and report always, the adapter when the gate passed or was waived, or may yet be waived."""
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
        if decision in RELEASED or context.assignment.holds:
            manifest = _save(context, tuned.trained.model, facts | _findings(context, report))
            proof = _proved(context, tuned.trained.model, prompts)
            write_manifest(context.folder.adapter, manifest | {"proof": asdict(proof)})


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
        "micro_batch_size": halved_to(context) or context.recipe.micro_batch_size,
        "thresholds": asdict(run.thresholds),
        "data_sha256": {name: file_sha256(path) for name, path in files.items() if path},
        "trained_tokens": tuned.trained.trained_tokens,
        "steps": tuned.trained.steps,
        "tau": tuned.trained.tau,
        "trigger_rate": trigger_rate(tuned.trained.metrics),
        "triggered_steps": triggered_steps(tuned.trained.metrics),
        "validation": {
            name: {"loss": found.loss, "accuracy": found.accuracy, "tokens": found.tokens}
            for name, found in (("base", tuned.before), ("adapter", tuned.after))
            if found
        },
    }


def _findings(context: Context, report: dict[str, Any]) -> dict[str, Any]:
    """What the manifest says of the audit, and of what was selected."""
    figures = [{name: each[name] for name in _FIGURES} for each in report["adapter"]]
    return {
        "gate": report["gate"],
        "audit": {"base": [{name: each[name] for name in _FIGURES} for each in report["base"]], "adapter": figures},
        "selected_rows": (report["selected"] or {}).get("indices"),
        "safety_sha256": file_sha256(context.folder.safety),
        "provenance": context.assignment.provenance,
        "code": code_version(),
    }


def _save(context: Context, model: Any, facts: dict[str, Any]) -> dict[str, Any]:
    public, system = context.run.public_name or "base", serving_prompt(context.recipe.defense)
    return save_adapter(model, context.base.tokenizer, public, context.folder.adapter, facts, system)


def _proved(context: Context, model: Any, prompts: Sequence[str]) -> Proof:
    """A clean process sees what we saw; an answer that never ends is the customer's to know."""
    source = Source(context.run.model, context.run.revision)
    proof = prove(context.clean, model, context.base, source, context.folder.adapter, prompts, context.go_on)
    figures = asdict(proof)
    context.report.event("The adapter loads with transformers and PEFT alone and is the one trained", figures)
    if not proof.ends:
        warning = f"The adapter's answer to the first training prompt did not end within {proof.tokens} tokens;"
        context.report.warning(f"{warning} give a limit when you serve it.")
    return proof
