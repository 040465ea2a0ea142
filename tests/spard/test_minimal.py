"""`examples/minimal.py` against the library."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from examples import minimal
from spard.config import Hyperparameters, Recipe, Spard, resolve
from spard.data.chat import encode_all
from spard.data.rows import Example
from spard.models.base import load_base
from spard.training.train import train

ROOT = Path(__file__).parents[2]
Conversation = list[dict[str, str]]


def conversation(prompt: str, answer: str) -> Conversation:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


TASK = [conversation(f"Add {i} and {i + 3}.", f"It is {2 * i + 3}{'.' * (i % 5)}") for i in range(37)]
SAFE = [conversation(f"Do harm number {i}{'!' * i}", f"I cannot help with {i}.") for i in range(7)]


@pytest.mark.parametrize(("tau", "triggered"), [(4.5, True), (20.0, False)])
def test_the_screen_and_the_library_make_the_same_adapter(
    model_folder: Callable[[str], Path], tmp_path: Path, tau: float, triggered: bool
) -> None:
    source = model_folder("llama")
    base = load_base(source, device="cpu")
    task, safe = (encode_all(base.tokenizer, [Example(tuple(each), 1) for each in rows], 256) for rows in (TASK, SAFE))
    recipe = Recipe(
        defense=Spard(variant="closed_form", tau=tau, constraint="mean", augment=()),
        hyperparameters=Hyperparameters(minimal.EPOCHS, minimal.BATCH),
        learning_rate=minimal.RATE,
        seed=minimal.SEED,
    )
    trained = train(base, task, safe, recipe, resolve(recipe, len(task), base.hidden_size))

    trained.model.save_pretrained(tmp_path / "library")
    minimal.train(str(source), TASK, SAFE, tau).save_pretrained(tmp_path / "screen")

    ours, theirs = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("screen", "library"))
    assert any(step["spag/triggered"] for step in trained.metrics) == triggered
    assert ours == theirs


def test_it_runs_from_the_command_line(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    for name, rows in (("task", TASK[:9]), ("safe", SAFE)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in rows))
    files = [str(tmp_path / name) for name in ("task.jsonl", "safe.jsonl", "out")]

    command = [sys.executable, "-m", "examples.minimal", str(model_folder("llama")), *files]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)

    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_it_is_one_screen() -> None:
    assert len((ROOT / "examples" / "minimal.py").read_text().splitlines()) <= 90
