"""The prove stage: a clean process loads the saved adapter without our code and must reproduce the trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spard.data.rows import Example, prompt_text
from spard.pipeline.context import Context
from spard.release.proof import PROMPTS, CleanProcess, Proof, Source, prove


def run(context: Context, clean: CleanProcess | None, model: Any, adapter: Path, examples: Sequence[Example]) -> Proof:
    """Prove the adapter in `adapter` and report the result; warn if an answer does not end.

    Raises `AdapterNotProved` unless the folder reproduces `model`.
    """
    proof = check(context, clean, model, adapter, examples)
    context.report.event("The adapter loads with transformers and PEFT alone and is the one trained", asdict(proof))
    if not proof.ends:
        warning = f"The adapter's answer to the first training prompt did not end within {proof.tokens} tokens;"
        context.report.warning(f"{warning} give a limit when you serve it.")
    return proof


def check(
    context: Context, clean: CleanProcess | None, model: Any, adapter: Path, examples: Sequence[Example]
) -> Proof:
    """Prove the adapter in `adapter` without reporting; `clean` is None except on rank 0.

    Raises `AdapterNotProved` unless the folder reproduces `model`.
    """
    context.report.activity("loading the adapter in a clean process, which proves it")
    source = Source(context.run.model, context.run.revision)
    prompts = [prompt_text(example) for example in examples[:PROMPTS]]
    return prove(clean, model, context.base, source, adapter, prompts, context.raise_if_stopped)
