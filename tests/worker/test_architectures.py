"""Architectures through a whole job: the paper's, and one of each kind of layer; the page has what came of all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.architectures import HEAD, PAGE, STEPS, outcome
from spard.release.proof import CleanProcess
from tests.architectures import ARCHITECTURES

ROOT = Path(__file__).parents[2]
OF_THE_PAPER = ("Qwen2.5", "Llama 3.2", "Qwen3", "SmolLM2")
KINDS = ("GPT-2", "Phi-3, Phi-4", "Mixtral", "DeepSeek-V3", "Granite 4 (hybrid)", "Gemma 3 (with images)")
REFUSED = ("MPT", "RWKV")


@pytest.fixture(scope="module")
def clean() -> Iterator[CleanProcess]:
    with CleanProcess() as process:
        yield process


@pytest.fixture(scope="module")
def rows() -> dict[str, str]:
    """The rows of the page, by the model that each is about."""
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert page.startswith(HEAD)
    return {line.split(" | ")[0].removeprefix("| "): line for line in page.removeprefix(HEAD).splitlines()}


@pytest.mark.parametrize("name", [*OF_THE_PAPER, *KINDS, *REFUSED])
def test_an_architecture_goes_through_a_job_as_the_page_says(
    name: str, clean: CleanProcess, rows: dict[str, str], tmp_path: Path
) -> None:
    found = outcome(name, tmp_path, clean)
    assert (found.passed == STEPS) == (found.refusal is None) == (name not in REFUSED)
    assert rows[name] == found.row


def test_the_page_has_every_architecture(rows: dict[str, str]) -> None:
    assert list(rows) == list(ARCHITECTURES)
    assert len(rows) >= 25
    refused = {name for name, row in rows.items() if "| refused: " in row}
    assert refused.isdisjoint(OF_THE_PAPER)
    assert len(refused) <= 6
