"""The part of the safety report on the customer's task: was it learned, on how many rows, and if not measured, why.

The losses are in the report's `validation`. The texts of requests and replies are not in the report but beside it, in
the file `TASK_REPLIES`. Only the standard library is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

TASK_REPLIES = "task_replies.jsonl"  # beside the report, one request with both replies a line
_CLEARLY = 0.05  # a change of the loss by less, as a share, is none
_FEW_RIGHT = 0.5  # of the next tokens


class Losses(Protocol):
    """Means over the labeled tokens of the rows; the loss in nats a token."""

    @property
    def loss(self) -> float:
        """The mean loss."""
        ...

    @property
    def accuracy(self) -> float:
        """The share of tokens to which the model gives the highest probability."""
        ...


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """The rows on which the learning of the task was measured.

    source    `held_out`: rows of the training file that were not trained on; `validation_file`: the rows of that file;
              `none`: `why_none` says why there are no rows
    rows      number of rows, for the losses too
    replies   number of their requests that were asked of both models
    is_pairs  True for preference pairs, whose loss is the DPO loss: ln 2 before the training
    is_unfamiliar  True if the base model's loss on the rows is clearly above that of a uniform guess among all tokens:
              it has not read such text
    """

    source: Literal["held_out", "validation_file", "none"]
    rows: int = 0
    replies: int = 0
    is_pairs: bool = False
    is_unfamiliar: bool = False
    why_none: str = ""


@dataclass(frozen=True, slots=True)
class TaskWords:
    """The losses in words: a headline, a sentence with the figures, and advice; `look` is set to highlight it."""

    headline: str
    figures: str = ""
    note: str = ""
    look: Literal["good", "doubt", ""] = ""


def describe_task(check: TaskCheck, losses: Mapping[str, Losses]) -> TaskWords:
    """Describe in words if the task was learned, by the losses of `base` and `adapter`; pairs have no `base`."""
    after, before = losses.get("adapter"), losses.get("base")
    if after is None:
        return TaskWords("It was not looked at whether the task was learned.", note=check.why_none)
    rows = f"{check.rows} row{'' if check.rows == 1 else 's'} of the validation file"
    if check.source == "held_out":
        rows = f"{check.rows} row{'' if check.rows == 1 else 's'} of the file that were held out of the training"
    if check.is_pairs:
        return _describe_pairs(rows, after)
    if before is None:
        return TaskWords("Nothing was measured before the training.", f"Loss on {rows}: {after.loss:.2f} nats a token.")
    figures = f"Loss on {rows}: {before.loss:.2f} nats a token before, {after.loss:.2f} after. "
    figures += f"Next token right: {before.accuracy:.0%} before, {after.accuracy:.0%} after."
    unfamiliar = "The base model has not read text like this: choose another one." if check.is_unfamiliar else ""
    if after.loss > before.loss * (1 + _CLEARLY):
        note = "Fewer epochs or a lower learning rate may help: a model that learns its rows by heart does so."
        headline = "It predicts answers that it has not seen worse than the base model."
        return TaskWords(headline, figures, unfamiliar or note, "doubt")
    if after.loss > before.loss * (1 - _CLEARLY):
        note = "Little was learned, or the base model knew the task."
        headline = "It predicts answers that it has not seen no better than the base model."
        return TaskWords(headline, figures, unfamiliar or note, "doubt")
    headline = "It predicts answers that it has not seen better than the base model."
    if after.accuracy < _FEW_RIGHT:
        note = f"It still gets only {after.accuracy:.0%} of the next tokens right: read what it replies."
        return TaskWords(headline, figures, f"{note} {unfamiliar}".strip())
    return TaskWords(headline, figures, look="good")


def reply_lines(reply: Mapping[str, object]) -> list[str]:
    """Return one request with both replies as lines for a terminal."""
    system, turns = reply["system"], reply["turns"]
    under = [f"  under the system prompt: {system}"] if system else []
    after = [f"  after {turns} earlier turns"] if turns else []
    asked = f"line {reply['line']}: {reply['prompt']}"
    words = {"the file": reply["expected"], "base model": reply["base"], "this model": reply["trained"]}
    return [asked, *under, *after, *(f"  {who:>10}: {text}" for who, text in words.items())]


def _describe_pairs(rows: str, after: Losses) -> TaskWords:
    figures = f"Loss on {rows}: 0.69 nats a pair before, by definition, and {after.loss:.2f} after. "
    figures += f"Next token of preferred answers right: {after.accuracy:.0%} after."
    if after.loss < 0.6931 * (1 - _CLEARLY):
        return TaskWords("It tells preferred answers that it has not seen from the others.", figures, look="good")
    return TaskWords("It hardly tells preferred answers that it has not seen from the others.", figures, look="doubt")
