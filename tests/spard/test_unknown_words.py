"""A base model that is worse at a file's words than chance is warned of; one that is near chance or better is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spard.config.run_spec import RunSpec
from spard.data.chat import encode_to_train
from spard.models.base import Base
from spard.pipeline.context import Context
from spard.pipeline.messages import Reporter
from spard.pipeline.rows import Rows
from spard.pipeline.train import warn_of_unknown_words
from tests.spard.parts import chat


@pytest.mark.parametrize(("sharpness", "is_warned"), [(0.0, False), (1.0, False), (400.0, True)])
def test_a_model_that_expects_other_words_is_warned_of(
    sharpness: float, is_warned: bool, load: Callable[..., Base], tmp_path: Path
) -> None:
    """The more sharply random weights expect something, the more they expect something else."""
    base, told = load(), list[dict[str, Any]]()
    with torch.no_grad():
        base.model.get_output_embeddings().weight.mul_(sharpness)
    examples = [chat(f"What is {i}?", f"It is {i}.") for i in range(20)]
    rows = Rows(examples, encode_to_train(base.tokenizer, examples, 512), [], [], None)
    context = Context(RunSpec("m", tmp_path / "train.jsonl"), base, Reporter(told.append))

    warn_of_unknown_words(context, rows)

    told = [each for each in told if each["kind"] != "activity"]
    assert len(told) == is_warned
    assert all(f"{math.log(len(base.model.get_input_embeddings().weight)):.1f}" in each["message"] for each in told)
