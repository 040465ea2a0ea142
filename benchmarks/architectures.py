"""Take a tiny random model of each architecture through a whole job, and write the table in `docs/architectures.md`.

`python -m benchmarks.architectures` rewrites the page; with names of architectures as arguments it only prints their
rows. The steps are the trial of `models add`, two training steps with the default defense, the proof of the saved
adapter in a clean process, the embedded engine's proof and an answer equal to PEFT's, and a merged export with the
adapter's logits. The table shows the error message of an architecture that is refused at one of these steps.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spard.commands.quiet import hide_notes
from spard.config import Hyperparameters, Lora, Recipe, Spard, resolve
from spard.errors import SpardError
from spard.models.adapters import save_adapter
from spard.models.base import Base, load_base
from spard.models.generate import generate
from spard.models.merged import save_merged
from spard.models.peft import PeftModel
from spard.models.targets import Reach
from spard.release.manifest import sign
from spard.release.proof import CleanProcess, Source, logit_distance, prove
from spard.training.train import train
from spard.training.trial import try_base
from tests.architectures import ARCHITECTURES, write_architecture
from tests.spard.parts import refusals, sums
from tests.worker.engine_in_process import KEY, TOKENS, Asked

PAGE = Path("docs/architectures.md")
STEPS = ("trial", "two steps", "proof", "engine", "merged")
QUESTIONS = ["What is two and two?", "Hello", "A longer question, about nothing in particular."]
_RECIPE = Recipe(
    defense=Spard(tau=4.0, safe_batch_size=2),
    lora=Lora(rank=4, alpha=8.0),
    hyperparameters=Hyperparameters(n_epochs=1, batch_size=2),
    learning_rate=2e-2,
)
_TOLERANCE = 1e-3  # of the largest logit: merged weights round differently, which recurrences and routers amplify
HEAD = """# Architectures

What each architecture goes through here, measured on tiny random models that transformers' own configurations make:
the trial of `spard models add`, a job of two steps with the default defense, the proof in a clean process, answers of
the audit and of the embedded engine that are those of transformers and PEFT, and a merged export that gives the
adapter's logits. An
architecture that cannot pass is refused, in the words of the last column.

LoRA adapts by default the attention of each decoder layer, and of a layer without one what takes its place; layers of
the feed-forward part, experts and their routers are left out. `spard check-model` and `spard models add` name the
modules and say which share of the layers and parameters they reach; `spard models add --target-modules` sets others for
a base model, and a job's `lora.target_modules` others again. How the default is found: `spard/models/targets.py`.

`python -m benchmarks.architectures` writes this page anew.

| model | kind | LoRA default | layers | passes |
|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one architecture: the steps it passed, and the error message of the step that refused it."""

    name: str
    reach: Reach | None
    passed: tuple[str, ...]
    refusal: str | None = None

    @property
    def row(self) -> str:
        """Return the outcome as a Markdown row of the table."""
        kind = ARCHITECTURES[self.name][0]
        targets = ", ".join(f"`{each}`" for each in self.reach.display_names) if self.reach else ""
        layers = f"{self.reach.layers} of {self.reach.of_layers}" if self.reach else ""
        told = "all" if self.refusal is None else f"refused: {self.refusal.replace('<', '&lt;')}"
        return f"| {self.name} | `{kind}` | {targets} | {layers} | {told} |"


def outcome(name: str, folder: Path, clean: CleanProcess) -> Outcome:
    """Take one architecture through all steps; a `SpardError` ends it as a refusal, any other error is raised."""
    model, passed, reach = write_architecture(name, folder / "model"), list[str](), None
    try:
        reach = try_base(model).reach
        passed.append("trial")
        base = load_base(model, device="cpu", dtype=torch.float32)
        tuned = _train_two_steps(base)
        passed.append("two steps")
        adapter = folder / "adapter"
        save_adapter(tuned, base, "tiny", adapter)
        prove(clean, tuned, base, Source(str(model), None), adapter, QUESTIONS, lambda: None)
        passed.append("proof")
        sign(adapter, KEY)
        _answers_as_peft(model, adapter)
        passed.append("engine")
        _merges(model, adapter, folder / "merged")
        passed.append("merged")
    except SpardError as error:
        return Outcome(name, reach, tuple(passed), error.message)
    return Outcome(name, reach, tuple(passed))


def _train_two_steps(base: Base) -> Any:
    """Return the model after one epoch of two training steps on four rows."""
    return train(base, sums(base, 4), refusals(base, 4), _RECIPE, resolve(_RECIPE, 4, base.hidden_size)).model


def _answers_as_peft(model: Path, adapter: Path) -> None:
    """Assert that the audit and the engine give the greedy replies of transformers and PEFT.

    The engine gets all prompts at once, with and without the adapter, so its batches mix lengths and adapters.
    """
    asked = Asked(model)
    loaded = asked.load(adapter)
    if loaded["kind"] != "loaded":
        raise SpardError(str(loaded.get("message", loaded)))
    expected = {with_adapter: _replies(model, adapter if with_adapter else None) for with_adapter in (True, False)}
    tuned = PeftModel.from_pretrained(load_base(model, device="cpu").model, adapter).eval()
    audited = generate(tuned, load_base(model, device="cpu").tokenizer, QUESTIONS, TOKENS)
    assert audited == [each.strip() for each in expected[True]], (audited, expected[True])
    numbers = [
        (asked.ask(text, name), i, name is not None)
        for i, text in enumerate(QUESTIONS)
        for name in (adapter.name, None)
    ]
    asked.run()
    for number, i, with_adapter in numbers:
        assert asked.text(number) == expected[with_adapter][i], (asked.text(number), expected[with_adapter][i])


def _replies(model: Path, adapter: Path | None) -> list[str]:
    """Return the greedy replies of transformers' `generate`, one question at a time."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    found: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = (PeftModel.from_pretrained(found, adapter) if adapter else found).eval()
    ends = sorted({tokenizer.eos_token_id, *tokenizer.get_added_vocab().values()})
    replies = []
    for question in QUESTIONS:
        asked = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        ids = tokenizer.apply_chat_template([{"role": "user", "content": question}], **asked)
        said = found.generate(
            **ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
        )
        replies.append(tokenizer.decode(said[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    return replies


def _merges(model: Path, adapter: Path, folder: Path) -> None:
    """Assert that a merged export, loaded again, gives the adapter's logits within `_TOLERANCE`."""
    save_merged(load_base(model, device="cpu", as_stored=True), adapter, folder)
    ids = torch.arange(20, 60).unsqueeze(0)
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tuned: Any = PeftModel.from_pretrained(base, adapter).eval()
    with torch.inference_mode():
        expected = tuned(input_ids=ids).logits[0]
        merged: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        found = merged.eval()(input_ids=ids).logits[0]
    assert logit_distance(found, expected) <= _TOLERANCE


def outcomes(names: list[str]) -> Iterator[Outcome]:
    """Yield the outcome of each architecture; one clean process proves all of them."""
    hide_notes()
    with CleanProcess() as clean:
        for name in names:
            with TemporaryDirectory() as folder:
                yield outcome(name, Path(folder), clean)


def main(names: list[str]) -> None:
    """Print the row of each named architecture; without names, take all of them and write the page."""
    rows = []
    for found in outcomes(names or list(ARCHITECTURES)):
        rows.append(found.row)
        sys.stdout.write(f"{found.row}\n")
        sys.stdout.flush()
    if not names:
        PAGE.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    main(sys.argv[1:])
