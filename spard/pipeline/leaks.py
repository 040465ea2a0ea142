"""Audit prompts that the training file contains: a few are left out of the audit, more are reported as a warning."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from spard.evaluation.contamination import find_hidden_leaks, overlap_notes, overlapping_prompts
from spard.pipeline.context import Context


def leave_out_leaks(context: Context) -> Context:
    """Return a context whose audit skips the few prompts that the training file contains, and report them.

    Also warns, before the training, of leaks that are too many to skip and that the gate will therefore find.
    """
    left_out = overlapping_prompts(context.run)
    for sentence in overlap_notes(left_out):
        context.report.event(sentence, {})
    for reason in dict.fromkeys(chain.from_iterable(find_hidden_leaks(context.run, left_out).values())):
        context.report.warning(reason)
    return replace(context, left_out=left_out)
