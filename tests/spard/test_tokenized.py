"""Of a pool only chosen rows are tokenized; of all others nothing but the prompt, to be embedded once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from spard.pipeline import run
from tests.narrowing import require
from tests.spard.test_run import write_rows, write_run

ROWS = 60


def test_a_whole_run_tokenizes_the_answers_of_chosen_rows_alone(
    model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, tokenize = list[str](), PreTrainedTokenizerBase.__call__

    def tokenize_and_note(self: PreTrainedTokenizerBase, text: Any, *more: Any, **options: Any) -> Any:
        texts.extend([text] if isinstance(text, str) else text)
        return tokenize(self, text, *more, **options)

    monkeypatch.setattr(PreTrainedTokenizerBase, "__call__", tokenize_and_note)
    prompts = [f"Steal the number {i}?" for i in range(ROWS)]
    answers = [f"I leave number {i} be." for i in range(ROWS)]
    pool = [{"prompt": p, "safe": a} for p, a in zip(prompts, answers, strict=True)]
    spec = replace(write_run(model_folder(), tmp_path), pool=write_rows(tmp_path / "pool.jsonl", pool))
    chosen = set(require(run(spec, tmp_path / "out", lambda message: None).selected).indices)

    assert 0 < len(chosen) < ROWS / 2
    assert {i for i in range(ROWS) if any(answers[i] in text for text in texts)} == chosen
    rest = {prompts[i] for i in range(ROWS) if i not in chosen}
    assert sorted(text for text in texts if any(prompt in text for prompt in rest)) == sorted(rest)
