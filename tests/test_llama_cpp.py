"""What the comparison with llama.cpp counts, on logits that are made here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks import llama_cpp
from benchmarks.llama_cpp import ROUNDING, Reply, compare, is_equal, summary

LOGITS = np.array([[0.0, 3.0, 1.0], [2.0, 0.0, 1.5], [0.0, 0.0, 4.0]], dtype=np.float32)
REPLY = Reply("ask", [7, 8], [1, 0, 2], LOGITS)


class Engine:
    """Answers with given logits, one row a call, and reads every text as the given tokens."""

    def __init__(self, logits: NDArray[np.float32], prompt: list[int] = REPLY.prompt) -> None:
        self.logits, self.prompt = logits, prompt
        self.calls: list[list[int]] = []

    def clear(self) -> None:
        self.calls.clear()

    def tokenize(self, text: str) -> list[int]:
        return self.prompt

    def decode(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        self.calls.append(list(tokens))
        row: NDArray[np.float32] = self.logits[len(self.calls) - 1]
        return row


def test_equal_logits_are_equal_whatever_is_added_to_all() -> None:
    engine = Engine(LOGITS + 5)
    found = compare(engine, REPLY)
    assert engine.calls == [[7, 8], [1], [0]]
    assert is_equal([found])
    assert summary([REPLY], [found]).startswith("1 of 1 texts equal, 1 prompts")


def test_a_token_that_differs_is_shown_with_the_margin() -> None:
    other = LOGITS.copy()
    other[1] = [1.5, 0.0, 2.0]
    found = compare(Engine(other), REPLY)
    assert found.step == 1
    assert not is_equal([found])
    text = summary([REPLY], [found])
    assert text.startswith("0 of 1 texts equal")
    assert "differs at token 1, where the margin is 0.5: 'ask'" in text


def test_equal_tokens_of_other_logits_are_another_model() -> None:
    other = LOGITS.copy()
    other[2, 0] += 10 * ROUNDING
    found = compare(Engine(other), REPLY)
    assert found.step is None
    assert not is_equal([found])


def test_a_prompt_that_is_read_as_other_tokens_is_counted() -> None:
    found = compare(Engine(LOGITS, prompt=[1, 7, 8]), REPLY)
    assert "0 prompts read as the same tokens" in summary([REPLY], [found])


@pytest.mark.parametrize(("shift", "code"), [(0.0, 0), (1.0, 1)])
def test_the_command_fails_where_float32_differs(
    shift: float, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Opened(Engine):
        def __init__(self, libraries: Path, model: Path, cache: str, *, flash_attention: bool | None) -> None:
            super().__init__(LOGITS + np.float32(shift) * np.eye(3, dtype=np.float32))

        def close(self) -> None: ...

    monkeypatch.setattr(llama_cpp, "Llama", Opened)
    monkeypatch.setattr(llama_cpp, "install", lambda tools: tools)
    monkeypatch.setattr(llama_cpp, "convert", lambda *arguments: None)
    monkeypatch.setattr(llama_cpp, "reference", lambda merged, prompts: iter([REPLY]))
    monkeypatch.setattr(sys, "argv", ["llama_cpp", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        llama_cpp.main()
    assert ended.value.code == code
    assert capsys.readouterr().out.count("texts equal") == 3
