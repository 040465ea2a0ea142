"""No part of a run is long without a message: measured in forward passes of the model, never in seconds."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from spard.config import DISGUISES_ALONE, Audit, Ending, Evidence, FurtherTuning, Hyperparameters, RowSignal, Selection
from spard.evaluation import own_refusal
from spard.models import budget
from spard.models.base import load_base
from spard.models.generate import generate
from spard.pipeline import row_signal
from spard.pipeline import rows as rows_of_run
from spard.pipeline.context import CheckpointPlan, Context
from spard.pipeline.messages import Message, Reporter
from spard.pipeline.package import Release
from spard.pipeline.stages import run_stages
from tests.spard.test_run import write_rows, write_run

PASS_TOKENS = 32  # less than a row has, so that every row is a pass and every reply a batch
MOST = 15  # passes between two messages; a training step takes the most
ROWS, TOKENS = 24, 20
WORK = (
    "asking the base model safe prompts, for its own refusals",
    f"asking the base model about {ROWS} rows",
    "asking the base model about [0-9]+ harmless requests",
    "asking the base model for its refusals of [0-9]+ rows",
    f"reading {ROWS} rows as vectors",
    f"asking the base model {ROWS} safe prompts",
    "computing the base model's loss on the pool's safe answers",
    "computing the base model's loss on its own safe answers",
    "asking the base model how its answers to harmless prompts begin",
    "asking the base model [0-9]+ prompts",
    "tuning the base model further on harmless rows",
    "asking the base model 5 requests of the file's rows",
    "measuring the audit's prompts before the probe",
    "training a short probe on the rows, without a defense",
    "measuring the audit's prompts after the probe",
    "computing the loss on validation rows",
    "computing the base model's loss on some training rows",
    "computing the states that the anchor holds",
    "computing the base model's loss on safe rows",
    "asking [0-9]+ attacks and [0-9]+ other prompts at the end of epoch 1 of 2",
    "asking the trained model 5 requests of the file's rows",
    "asking the trained model [0-9]+ prompts",
    "tuning the trained model further on harmless rows",
)


@dataclass(frozen=True)
class Heard:
    """A message, and the forward passes until then."""

    passes: int
    message: Message


def longest_silence(heard: Sequence[Heard]) -> tuple[int, str, str]:
    """The most passes between two messages with words, and their words; progress alone does not say of what it is."""
    told = [each for each in heard if each.message["kind"] != "progress"]
    return max(
        (after.passes - before.passes, describe(before.message), describe(after.message))
        for before, after in pairwise(told)
    )


def describe(message: Message) -> str:
    return str(message.get("doing") or message.get("phase") or message.get("message") or message["kind"])


def write_shortly(model: Any, tokenizer: Any, prompts: Sequence[str], most: int, **more: Any) -> list[str]:
    """`generate` with few tokens, which keeps this test short."""
    return generate(model, tokenizer, prompts, TOKENS, **more)


@pytest.fixture(scope="module")
def messages(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[Heard]:
    """All messages of one whole run."""
    folder = tmp_path_factory.mktemp("progress")
    spec = write_run(model_folder(), folder)
    rows = [{"prompt": f"Add {i} and 1.", "completion": f"It is {i + 1}."} for i in range(ROWS)]
    pool: list[dict[str, Any]] = [
        {"prompt": f"Do harm number {i}", "safe": f"I cannot, it is harm {i}."} for i in range(ROWS)
    ]
    pool += [{"prompt": f"Say hello {i}", "benign": True} for i in range(ROWS)]
    spec = replace(
        spec,
        training_file=write_rows(folder / "rows.jsonl", rows),
        validation_file=write_rows(folder / "held.jsonl", rows),
        pool=write_rows(folder / "safe.jsonl", pool),
        row_signal=RowSignal("defend", threshold=1e-30, max_inverted=1.0),
        evidence=Evidence(probe_steps=20),
        further_tuning=FurtherTuning(steps=20, batch_size=1),
        held_out_rows=8,
        recipe=replace(
            spec.recipe,
            hyperparameters=Hyperparameters(n_epochs=2, batch_size=2),
            anchors=replace(spec.recipe.anchors, begun_safe=1, begun_benign=1),
            selection=Selection(min_examples=ROWS, safe_answers="auto"),
            ending=Ending(keep="best", prompts=4),
            audit=Audit(max_new_tokens=TOKENS, max_prompts=4, asking=DISGUISES_ALONE),
        ),
    )
    found, passes = list[Heard](), [0]
    base = load_base(spec.model, device="cpu")
    base.model.get_decoder().register_forward_pre_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))
    report = Reporter(lambda message: found.append(Heard(passes[0], message)), lambda: float(passes[0]))
    plan = CheckpointPlan(folder / "checkpoints", prompts=4)
    budget.set_tokens(PASS_TOKENS)
    try:
        with pytest.MonkeyPatch.context() as patch:
            # All that the model says refuses, and all answers of the files comply: every part of the signal has work.
            patch.setattr(rows_of_run, "HARMLESS", 5)  # and its answers to safe prompts are taken all the same
            patch.setattr(own_refusal, "complies", lambda text: "t is" in text)
            patch.setattr(row_signal, "excuse", lambda examples, flagged, *rest: flagged)
            for module in (own_refusal, row_signal):
                patch.setattr(module, "REPLY", TOKENS)
            patch.setattr(rows_of_run, "generate", write_shortly)
            run_stages(Context(spec, base, report, checkpoints=plan), Release(folder / "out"), None)
    finally:
        budget.set_tokens(None)
    return found


def test_no_part_of_a_run_is_long_without_a_message(messages: list[Heard]) -> None:
    assert longest_silence(messages)[0] <= MOST, longest_silence(messages)


@pytest.mark.parametrize("doing", WORK)
def test_each_long_work_reports_its_progress(messages: list[Heard], doing: str) -> None:
    assert longest_silence(messages)[0] <= MOST
    others = [each for each in messages if not re.fullmatch(doing, each.message.get("doing", ""))]
    assert longest_silence(others)[0] > MOST


def test_work_on_rows_tells_how_far_it_is_until_its_end(messages: list[Heard]) -> None:
    for doing in WORK:
        steps = [each.message for each in messages if re.fullmatch(doing, each.message.get("doing", ""))]
        assert all(0 <= each["done"] <= each["total"] for each in steps), doing
        assert {each["done"] for each in steps} > {0}, doing
