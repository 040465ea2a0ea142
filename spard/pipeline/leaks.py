"""Audit prompts that the training file holds: a few are left out of the audit, and of more the run is warned."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from spard.evaluation.contamination import hidden_leaks_of, prompts_to_leave_out, tell_left_out
from spard.pipeline.context import Context


def leave_out_leaks(context: Context) -> Context:
    """Return a context whose audit does without the few prompts that the training file holds, and tell how many.

    Warn, before anything is trained, of those that the gate will find in what is trained on.
    """
    left_out = prompts_to_leave_out(context.run)
    for sentence in tell_left_out(left_out):
        context.report.event(sentence, {"left_out": sum(map(len, left_out.values()))})
    for reason in dict.fromkeys(chain.from_iterable(hidden_leaks_of(context.run, left_out).values())):
        context.report.warning(reason)
    return replace(context, left_out=left_out)
