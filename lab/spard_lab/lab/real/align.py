"""Align the downloaded model: train a LoRA adapter on the rows of `rows` as a job does, and merge it into the weights.

    models/smollm2-135m-0123456789ab/model       the aligned model, in transformers' format
    models/smollm2-135m-0123456789ab/own.json    the downloaded model's own answers
    models/.smollm2-135m-0123456789ab.part       an alignment in progress: own answers, resume states, seconds; a lock

The name has a digest of everything that determines the weights except the code: packages, seed, mixture and training.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from spard.config import Hyperparameters, Lora, NoDefense, Recipe, resolve
from spard.data.chat import encode_all
from spard.models.adapters import save_full
from spard.models.base import Base, load_base
from spard.models.targets import QKVO
from spard.training.train import train
from spard_lab.lab.natural.base import alone
from spard_lab.lab.natural.chats import Chat, exchange
from spard_lab.lab.natural.splits import deal
from spard_lab.lab.pretrain import threads
from spard_lab.lab.real.rows import Mixture, alignment_chats, as_examples, own_answers

log = logging.getLogger(__name__)

NAME, FACTS = "smollm2-135m", "base.json"
SAVE_EVERY_S = 60.0  # between two resume states
_PASS_TOKENS = 512  # padded tokens in a micro-batch
_OWN, _STATES, _SECONDS = "own.json", "states", "seconds.json"


@dataclass(frozen=True, slots=True)
class Alignment:
    """The settings that determine the aligned model, apart from the downloaded one."""

    seed: int = 1
    mixture: Mixture = field(default_factory=Mixture)
    rank: int = 16
    learning_rate: float = 4e-4

    def recipe(self) -> Recipe:
        """Return the training as a job's recipe."""
        return Recipe(
            defense=NoDefense(),
            lora=Lora(self.rank, 2.0 * self.rank, target_modules=(*QKVO, "gate_proj", "up_proj", "down_proj")),
            hyperparameters=Hyperparameters(n_epochs=1, batch_size=2),  # one pair
            learning_rate=self.learning_rate,
            seed=self.seed,
            pass_tokens=_PASS_TOKENS,
            checkpoint_every_s=SAVE_EVERY_S,
        )

    def digest(self, downloaded: str) -> str:
        """Return a digest of the settings and of `downloaded`, the identity of the downloaded model."""
        asked = asdict(self) | {"downloaded": downloaded}
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]


def aligned_model(models: Path, downloaded: Path, identity: str, settings: Alignment, cores: int = 1) -> Path:
    """Return the folder of the aligned model below `models`; make it, or resume making it, if it does not exist.

    `identity` identifies the downloaded model. A second process that wants the same model waits for the first.
    """
    done = models / f"{NAME}-{settings.digest(identity)}"
    part = models / f".{done.name}.part"
    if done.exists():
        return done
    with alone(part):
        if not done.exists():
            with threads(cores):
                _make(part, downloaded, settings)
            shutil.rmtree(part / _STATES, ignore_errors=True)
            part.rename(done)
    return done


def _make(part: Path, downloaded: Path, settings: Alignment) -> None:
    clock = _Clock(part / _SECONDS)
    base = load_base(downloaded, device="cpu")
    own = _own_answers(part / _OWN, base, settings.mixture)
    clock.keep()
    chats = alignment_chats(deal(settings.seed), own, settings.seed, settings.mixture)
    rows = encode_all(base.tokenizer, as_examples(chats), base.sequence_limit(None))
    recipe = settings.recipe()
    log.info("aligning on %d rows", len(rows))
    steps = resolve(recipe, len(rows), base.hidden_size)
    trained = train(
        base,
        rows,
        [],
        recipe,
        steps,
        on_step=report,
        resume_states=part / _STATES,
        on_saved=lambda saved, metrics: clock.keep(),
        shuffle=False,
    )
    merged = trained.model.merge_and_unload()
    save_full(merged, downloaded.name, part / "model")
    base.tokenizer.save_pretrained(part / "model")
    facts = {"cpu_s": clock.seconds(), "rows": len(rows)}
    _write(part / FACTS, facts | asdict(settings))


class _Clock:
    """CPU seconds of an alignment so far, including processes that were killed."""

    def __init__(self, file: Path) -> None:
        self._file, self._began = file, time.process_time()
        self._before = float(json.loads(file.read_text())) if file.exists() else 0.0

    def seconds(self) -> float:
        """Return the CPU seconds so far."""
        return round(self._before + time.process_time() - self._began, 1)

    def keep(self) -> None:
        """Write the seconds so far to the file."""
        _write(self._file, self.seconds())


def _own_answers(file: Path, base: Base, mixture: Mixture) -> list[Chat]:
    """Return the downloaded model's own answers, from the file if an earlier attempt wrote them."""
    if not file.exists():
        own = own_answers(base, "alignment", mixture.reply_tokens)
        _write(file, [[chat.request, chat.answer] for chat in own])
    return [exchange(request, answer) for request, answer in json.loads(file.read_text(encoding="utf-8"))]


def report(step: int, total: int, metrics: Any) -> None:
    """Log every 20th step and the last one."""
    if step % 20 == 0 or step == total:
        log.info("step %d of %d, loss %.3f", step, total, metrics.get("loss/task", float("nan")))


def _write(file: Path, value: object) -> None:
    """Write JSON atomically."""
    aside = file.with_name(f".{file.name}.aside")
    aside.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    aside.replace(file)
