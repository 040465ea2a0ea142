"""A later audit: repeats the current audit on a model that was released before; it trains nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spard.config.run_spec import to_mapping
from spard.data.chat import ask_in_mode, learned_modes
from spard.data.rows import read_examples
from spard.models.base import load_base
from spard.models.lora import load_adapter_, trainable_model
from spard.pipeline import agent, audit
from spard.pipeline.audit import leave_out_leaks
from spard.pipeline.base_figures import base_figures
from spard.pipeline.context import Context
from spard.pipeline.package import audit_figures
from spard.release.report import Measured, summarize
from spard.release.version import code_version


def run(context: Context, weights: Path, found: Path) -> Measured:
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
