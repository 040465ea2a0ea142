"""Evidence that needs no trigger: an undefended probe of the customer's rows before the training, reported only.

The probe learns all rows of the file, also those that the row signal leaves out: it says what the file teaches, not
what the released model has learned. It never fails a run and decides nothing; a run may ask more prompts for it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from spard import distributed
from spard.config.checks import PROBE_BATCH_SIZE
from spard.data.chat import encode_to_train
from spard.data.rows import Prompt
from spard.errors import NonFiniteLoss, is_gpu_out_of_memory
from spard.evaluation.ask import as_asked
from spard.evaluation.audit import sample
from spard.evaluation.statistics import conformal_p_value
from spard.evaluation.suites import read_suite
from spard.pipeline.context import Context
from spard.pipeline.rows import Rows
from spard.release.records import EvidenceRecord, read_record, reference_ratios
from spard.training import undefended

_OUTPUT = "evidence"
_GPU_ROWS = 4  # of a pass: the memory plan is made later, for the training
_MOST_ROWS = 2048  # of the file that are encoded; a probe of 32 steps draws 512


def run(context: Context, rows: Rows) -> None:
    """Measure the probe and store its record, unless the run asks for none or an earlier attempt has stored it.

    Must come before the training: it needs the base model without an adapter.
    """
    if not context.run.evidence.probe_steps or context.outputs.read(_OUTPUT) is not None:
        return
    started = time.perf_counter()
    with context.time_stage("evidence"):
        record = _compare(context, _measure(context, rows))
    context.outputs.write(_OUTPUT, asdict(record))
    if record.shift_ratio is not None:  # a probe that was not trained to its end says nothing about a step's time
        context.report.cost("evidence", time.perf_counter() - started, record.steps)
    context.report.event(f"Evidence: {record.sentence}", asdict(record))


def kept_record(context: Context) -> EvidenceRecord | None:
    """Return the stored record; None if the run asks for no probe."""
    found = context.outputs.read(_OUTPUT)
    return None if found is None else read_record(EvidenceRecord, found)


def lengthen_audit(context: Context) -> Context:
    """Return the context with a longer audit if the evidence is unusual and the run wants this; else the context.

    A longer audit asks each suite as a whole, and twice as many prompts in each other way. Call it before the base
    model is asked, so that both models are asked the same.
    """
    record = kept_record(context)
    if record is None or not (record.is_unusual and context.run.evidence.longer_audit):
        return context
    longer = context.recipe.audit.lengthen()
    context.report.event("The evidence is unusual: the audit asks every suite as a whole, and more in other ways.", {})
    return replace(context, run=replace(context.run, recipe=replace(context.recipe, audit=longer)))


def _measure(context: Context, rows: Rows) -> EvidenceRecord:
    prompts, steps = _prompts(context), context.run.evidence.probe_steps
    nothing = EvidenceRecord(_comparable(context, prompts), steps)
    if distributed.world_size() > 1 or context.recipe.sharding != "none":
        return replace(nothing, why_none="it needs the whole base model on one GPU")
    for kind, found in prompts.items():
        if not found:
            return replace(nothing, why_none=f"the audit has no {kind} suite")
    try:
        shift = _shift(context, rows, prompts, steps)
    except NonFiniteLoss:
        return replace(nothing, why_none="its loss was not finite")
    except RuntimeError as error:
        if not is_gpu_out_of_memory(error):
            raise
        return replace(nothing, why_none="the GPU had too little memory for it")
    counts = shift.harmful_prompts, shift.benign_prompts
    return EvidenceRecord(nothing.comparable, steps, shift.ratio, shift.harmful, shift.benign, *counts)


def _shift(context: Context, rows: Rows, prompts: Mapping[str, Sequence[Prompt]], steps: int) -> undefended.ProbeShift:
    examples, recipe = sample(rows.examples, _MOST_ROWS), context.recipe
    if recipe.micro_batch_size is None and context.base.device.type == "cuda":
        recipe = replace(recipe, micro_batch_size=_GPU_ROWS)
    is_pairs = context.recipe.dpo is not None
    encoded = encode_to_train(context.base.tokenizer, examples, context.limit, pairs=is_pairs)
    samples = [each for row in encoded for each in row.samples]
    return undefended.measure_probe_shift(
        context.base,
        samples,
        prompts["harmful"],
        prompts["benign"],
        steps=steps,
        seed=context.recipe.seed,
        recipe=recipe,
        report=context.report.activity,
    )


def _prompts(context: Context) -> dict[str, list[Prompt]]:
    """Return the prompts of the harmful and of the benign suites that the probe is measured on."""
    suites = [read_suite(each) for each in context.run.suites]
    return {
        kind: sample(
            [prompt for suite in suites if suite.kind == kind for prompt in suite.prompts], undefended.MOST_PROMPTS
        )
        for kind in ("harmful", "benign")
    }


def _comparable(context: Context, prompts: Mapping[str, Sequence[Prompt]]) -> str:
    """Return the digest of everything that a ratio depends on beside the rows and the seed."""
    asked = {kind: as_asked(context.base.tokenizer, found) for kind, found in prompts.items()}
    budget = [
        context.run.evidence.probe_steps,
        PROBE_BATCH_SIZE,
        undefended.PROBE_RANK,
        undefended.PROBE_RATE_MULTIPLIER,
    ]
    facts = [context.base.digest, str(context.base.model.dtype), asked, budget]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _compare(context: Context, record: EvidenceRecord) -> EvidenceRecord:
    """Return the record with its p-value among the run's references, if there are any to compare it with."""
    path = context.run.evidence_references
    ratios = reference_ratios(json.loads(path.read_text()) if path else None, record.comparable)
    if record.shift_ratio is None or not ratios:
        return record
    return replace(record, references=len(ratios), p_value=conformal_p_value(record.shift_ratio, ratios))
