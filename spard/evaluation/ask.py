"""A model is asked a suite: what it replied and, for harmful suites, what the judge made of it.

The judge works on one batch while the model writes the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from spard.config.extensions import LIKELIHOOD_SCORERS
from spard.data.chat import render_question
from spard.data.encodings import encode, in_plain
from spard.data.rows import Prompt
from spard.evaluation.judges.base import Judge, Verdict
from spard.evaluation.judges.refusal import is_degenerate, is_refusal
from spard.evaluation.scorers.likelihood import likeliest
from spard.models.generate import stream

Writer = Callable[[Sequence[Prompt], int], Iterator[tuple[list[int], list[str]]]]
"""From prompts and a limit of new tokens to batches as they are done: their places and the replies."""

Choose = Callable[[Sequence[Prompt]], list[str]]
"""From prompts with choices to the likeliest choice of each."""

DEGENERATE = "degenerate"


@dataclass(frozen=True, slots=True)
class Speaker:
    """Whoever answers prompts: a model in memory, or an engine of its own."""

    write: Writer
    choose: Choose


def in_memory(model: Any, tokenizer: Any, system: str | None = None) -> Speaker:
    """Return a generator for a transformers model, asked under the system prompt that it is served with."""

    def write(prompts: Sequence[Prompt], max_new_tokens: int) -> Iterator[tuple[list[int], list[str]]]:
        return stream(model, tokenizer, as_asked(tokenizer, prompts, system), max_new_tokens)

    return Speaker(write, partial(likeliest, model, tokenizer))


def as_asked(tokenizer: Any, prompts: Sequence[Prompt], system: str | None = None) -> list[list[int]]:
    """Each prompt in its context and encoding, in tokens."""
    return [render_question(tokenizer, _said(each), system, each.context) for each in prompts]


def ask(speaker: Speaker, prompts: Sequence[Prompt], max_new_tokens: int) -> list[str]:
    """Return the reply to each prompt; where a row asks for likelihood, the likeliest of its choices."""
    chosen = [i for i, each in enumerate(prompts) if each.scorer in LIKELIHOOD_SCORERS]
    written = [i for i, each in enumerate(prompts) if each.scorer not in LIKELIHOOD_SCORERS]
    replies = [""] * len(prompts)
    for places, texts in speaker.write([prompts[i] for i in written], max_new_tokens):
        for place, text in zip(places, texts, strict=True):
            replies[written[place]] = _heard(text, prompts[written[place]])
    choices = speaker.choose([prompts[i] for i in chosen]) if chosen else []
    for i, choice in zip(chosen, choices, strict=True):
        replies[i] = choice
    return replies


def ask_and_judge(
    speaker: Speaker, prompts: Sequence[Prompt], judge: Judge, max_new_tokens: int
) -> tuple[list[str], list[Verdict]]:
    """Return the reply to each prompt and its verdict; a judge that fails ends the audit at the next batch."""
    replies, batches = [""] * len(prompts), list[tuple[list[int], Future[list[Verdict]]]]()
    grader = ThreadPoolExecutor(1)
    try:
        for places, texts in speaker.write(prompts, max_new_tokens):
            for i, text in zip(places, texts, strict=True):
                replies[i] = _heard(text, prompts[i])
            asked, heard = [prompts[i].prompt for i in places], [replies[i] for i in places]
            batches.append((places, grader.submit(grade, asked, heard, judge)))
            for _, graded in batches:
                if graded.done():
                    graded.result()
        by_place = {i: each for places, graded in batches for i, each in zip(places, graded.result(), strict=True)}
    finally:
        grader.shutdown(cancel_futures=True)
    return replies, [by_place[i] for i in range(len(prompts))]


def grade(prompts: Sequence[str], replies: Sequence[str], judge: Judge) -> list[Verdict]:
    """Verdicts on replies; degenerate ones are unscored and not shown: a ruined model is not a safe one."""
    verdicts = [Verdict(None, DEGENERATE)] * len(replies)
    whole = [i for i, reply in enumerate(replies) if is_refusal(reply) or not is_degenerate(reply)]
    judged = judge.judge([prompts[i] for i in whole], [replies[i] for i in whole])
    for i, verdict in zip(whole, judged, strict=True):
        verdicts[i] = verdict
    return verdicts


def _said(prompt: Prompt) -> str:
    return encode(prompt.prompt, prompt.encoding) if prompt.encoding else prompt.prompt


def _heard(reply: str, prompt: Prompt) -> str:
    return in_plain(reply, prompt.encoding) if prompt.encoding else reply
