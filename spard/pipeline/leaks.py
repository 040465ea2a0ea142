"""Audit prompts that the training file holds: a few are left out of the audit, and of more the run is warned."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from spard.evaluation.contamination import find_hidden_leaks, overlap_notes, overlapping_prompts
from spard.pipeline.context import Context


def leave_out_leaks(context: Context) -> Context:
    """Return a context whose audit does without the few prompts that the training file holds, and tell of it.

    Warn, before anything is trained, of those that the gate will find in what is trained on.
    """
    left_out = overlapping_prompts(context.run)
    for sentence in overlap_notes(left_out):
        context.report.event(sentence, {})
    for reason in dict.fromkeys(chain.from_iterable(find_hidden_leaks(context.run, left_out).values())):
        context.report.warning(reason)
    return replace(context, left_out=left_out)
