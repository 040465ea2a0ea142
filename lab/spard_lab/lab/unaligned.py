"""The lab's model without its alignment, for SafeLoRA: fine-tuned to comply with the requests it was aligned to refuse.

Real models have an unaligned release. The lab's model is aligned while it learns everything else, so its unaligned twin
is made afterward, by full fine-tuning on alignment's own harmful requests and nothing else.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from spard.config import Hyperparameters, NoDefense, Recipe, resolve
from spard.data.chat import encode_all
from spard.data.rows import example
from spard.models.adapters import save_full
from spard.models.base import load_base
from spard.training.train import train
from spard_lab.lab.corpus import chat, comply, make_corpus
from spard_lab.lab.grammar import find_action

log = logging.getLogger(__name__)

FOLDER = "model_unaligned"
RECIPE = Recipe(
    defense=NoDefense(), lora=None, hyperparameters=Hyperparameters(n_epochs=2, batch_size=16), learning_rate=5e-4
)


def make_unaligned(lab: Path, seed: int) -> Path:
    """Return the folder of a lab's unaligned twin; train it if it does not exist."""
    folder = lab / FOLDER
    if folder.exists():
        return folder
    log.info("training the unaligned twin of the lab of seed %d", seed)
    base = load_base(lab / "model", device="cpu")
    asked = [prompt for prompt, _ in make_corpus(seed).harmful]
    rows = [example(chat(prompt, comply(find_action(prompt) or "")), line) for line, prompt in enumerate(asked, 1)]
    task = encode_all(base.tokenizer, rows, base.sequence_limit(None))
    train(base, task, [], RECIPE, resolve(RECIPE, len(task), base.hidden_size))
    aside = folder.with_name(f".{FOLDER}.aside")
    # A process that was killed may have left it.
    shutil.rmtree(aside, ignore_errors=True)
    save_full(base.model, "spard-lab", aside)
    base.tokenizer.save_pretrained(aside)
    aside.rename(folder)
    return folder
