"""A natural lab: a folder with the files of the small lab, and a base model of natural English that labs share.

    natural-5m-problems-seed-1/
        model -> .../models/5m-0123456789ab/model    the base model
        train.jsonl, attack.jsonl, pool.jsonl, ...   as in `spard_lab.lab.make`; no duplicated or paraphrased pool
        pool_benign.jsonl                            harmless requests with answers, for defenses with benign rows
        known_benign.jsonl                           harmless requests of the alignment split
        labeled.jsonl                                replies whose harm is known, for `spard judge --labeled`
        lab.json                                     the settings, digests of the files, words that attacks need
    models/
        5m-0123456789ab/model                        the model, in transformers' format
        5m-0123456789ab/base.json                    the settings, and the CPU seconds of the training
        .5m-0123456789ab.part                        a training in progress: its last state, and a lock

A base model is made once, in a folder named after the digest of its settings, and resumed after a kill. The digest
covers everything that determines the weights except the code: size, seed, and the bytes of the real text. A lab's own
seed determines its files.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from spard.data.encodings import encode
from spard.data.languages import ENGLISH
from spard.digests import folder_digest
from spard.evaluation.calibration.errors import measure_judge
from spard.evaluation.calibration.gaming import measure_gaming
from spard.evaluation.calibration.labeled import LabeledReply
from spard.evaluation.calibration.record import OF_MODEL, JudgeRecord, read_record
from spard.models.adapters import save_full
from spard_lab.lab.customers import GERMAN_LANGUAGE
from spard_lab.lab.make import FACTS, FolderTaken, as_text, read_facts, temporary_folder
from spard_lab.lab.natural.chats import ROLES, TEMPLATE
from spard_lab.lab.natural.corpus import german_rows, labeled_rows, make_files
from spard_lab.lab.natural.phrasing import OPENERS
from spard_lab.lab.natural.real import RealText, read_real
from spard_lab.lab.natural.sizes import Size, find_size
from spard_lab.lab.natural.splits import deal
from spard_lab.lab.natural.stream import Stream
from spard_lab.lab.natural.tasks import Task, pairs
from spard_lab.lab.natural.truth import TruthJudge
from spard_lab.lab.pretrain import POSITIONS, Pretraining, make_tokenizer, new_model, threads

log = logging.getLogger(__name__)

BASE_FACTS, STATE = "base.json", "state.safetensors"
SAVE_EVERY = 50  # steps


@dataclass(frozen=True, slots=True)
class BaseSettings:
    """The settings of a base model: the name of its size, its seed, and a folder of real text or None."""

    size: str = "5m"
    seed: int = 1
    texts: Path | None = None

    def to_json(self, real: RealText) -> dict[str, Any]:
        """Return the settings as JSON; equal settings give equal models."""
        return {"size": self.size, "seed": self.seed, "real": real.digest, **asdict(find_size(self.size))}


def base_model(folder: Path, settings: BaseSettings, cores: int = 1) -> Path:
    """Return the folder of a base model below `folder`; train it if it does not exist.

    A second process that wants the same model waits for the first. The last digits of the weights depend on `cores`.
    """
    real = read_real(settings.texts)
    asked = settings.to_json(real)
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]
    done = folder / f"{settings.size}-{digest}"
    part = folder / f".{done.name}.part"
    if done.exists() and _is_measured(done / "model"):
        return done
    with alone(part):
        # Checked again under the lock: another process may have made the model meanwhile.
        if not done.exists():
            _make(part, asked, settings, real, cores)
            (part / STATE).unlink()
            part.rename(done)
        elif not _is_measured(done / "model"):  # made by an earlier version
            _measure_judge(done / "model", settings.seed)
    return done


def _make(part: Path, asked: dict[str, Any], settings: BaseSettings, real: RealText, cores: int) -> None:
    size, began = find_size(settings.size), time.process_time()
    stream = Stream.from_deal(deal(settings.seed), size.mixture, real)
    tokenizer = _tokenizer(stream, settings, size)
    training = Pretraining(new_model(tokenizer, settings.seed, size.plan, size.shape), size.plan)
    before = _resume(part / STATE, training)
    log.info("%s: %d parameters, step %d", part.name, training.model.num_parameters(), training.step)
    with threads(cores):
        while training.step < size.plan.steps:
            training.take(stream.window(tokenizer, settings.seed, training.step, size.plan))
            if training.step % SAVE_EVERY == 0:
                _keep(part / STATE, training, before + time.process_time() - began)
    training.model.eval()
    _keep(part / STATE, training, before + time.process_time() - began)
    save_full(training.model, f"spard-natural-{settings.size}", part / "model")
    tokenizer.save_pretrained(part / "model")
    _measure_judge(part / "model", settings.seed)
    facts = asked | {"cpu_s": round(before + time.process_time() - began, 1)}
    (part / BASE_FACTS).write_text(json.dumps(facts, indent=2) + "\n")


def _is_measured(model: Path) -> bool:
    file = model / OF_MODEL
    return file.exists() and {ENGLISH, GERMAN_LANGUAGE} <= {each.language for each in read_record(file).languages}


def _measure_judge(model: Path, seed: int) -> None:
    """Store with the model the error rates of the judge `truth` on replies whose harm is known."""
    rows = [*labeled_rows(seed, deal(seed)), *german_rows(seed, deal(seed))]
    labeled = [LabeledReply(row["prompt"], row["reply"], row["harmful"], row.get("language", ENGLISH)) for row in rows]
    judge, harmful = TruthJudge(), [(each.prompt, each.reply) for each in labeled if each.is_harmful]
    errors = tuple(measure_judge(judge, labeled))
    JudgeRecord(judge.name, errors, folder_digest(model), measure_gaming(judge, harmful)).write(model / OF_MODEL)


def _tokenizer(stream: Stream, settings: BaseSettings, size: Size) -> PreTrainedTokenizerFast:
    """Learn a tokenizer from rows of the stream and of the tasks, in plain text and in rot13."""
    rng = random.Random(f"natural {settings.seed} tokenizer")
    chats = list(islice(stream.chats(rng), size.texts))
    texts = [text for chat in chats for text in (*(str(turn["content"]) for turn in chat.messages), chat.answer)]
    for task in ("problems", "messages"):
        for prompt, answer, _ in islice(pairs(task, rng), size.texts // 10):
            texts += [prompt, answer]
    coded = (encode(text, "rot13") for text in texts)
    return make_tokenizer([*texts, *coded], POSITIONS, size.vocabulary, ROLES, TEMPLATE)


def _resume(path: Path, training: Pretraining) -> float:
    """Restore the state of an interrupted training; return the CPU seconds that it had used."""
    if not path.exists():
        return 0.0
    state = load_file(path)
    training.load_state(state)
    return float(state["cpu_s"])


def _keep(path: Path, training: Pretraining, seconds: float) -> None:
    aside = path.with_suffix(".aside")
    save_file(training.state() | {"cpu_s": torch.tensor(seconds)}, aside)
    aside.replace(path)


@contextmanager
def alone(part: Path) -> Iterator[None]:
    """Hold an exclusive lock beside the folder; the kernel releases it however the process ends."""
    part.mkdir(parents=True, exist_ok=True)
    lock = part.with_suffix(".lock")
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        part.mkdir(exist_ok=True)
        yield
        # Empty if another process made the model while this one waited for the lock.
        if part.exists() and not os.listdir(part):
            shutil.rmtree(part)


@dataclass(frozen=True, slots=True)
class LabSettings:
    """The settings of a natural lab beside its own seed: the base model, and the customers' training task."""

    base: BaseSettings = field(default_factory=BaseSettings)
    task: Task = "problems"


def folder_name(settings: LabSettings, seed: int) -> str:
    """Return the name of a lab's folder, which tells seeds, sizes and tasks apart."""
    return f"natural-{settings.base.size}-{settings.task}-seed-{seed}"


def make_natural(folder: Path, seed: int, settings: LabSettings, models: Path, cores: int = 1) -> dict[str, Any]:
    """Make a lab in `folder` and return its facts; keep a folder that already holds this lab.

    Raises `FolderTaken` if the folder holds something else.
    """
    model = base_model(models, settings.base, cores)
    real, dealt = read_real(settings.base.texts), deal(settings.base.seed)
    files = make_files(seed, dealt, settings.task, real) | {"labeled.jsonl": labeled_rows(seed, dealt)}
    contents, digests = as_text(files)
    facts = {"kind": "natural", "seed": seed, "task": settings.task, "base": model.name, "files": digests}
    facts["openers"] = list(OPENERS)
    if read_facts(folder) == facts:
        return facts
    if folder.exists() and any(folder.iterdir()):
        raise FolderTaken(f"{folder} holds something else than this lab; name another folder", "folder")
    with temporary_folder(folder) as aside:
        for name, text in contents.items():
            (aside / name).write_text(text)
        (aside / "model").symlink_to(os.path.relpath(model / "model", folder.absolute()))
        (aside / FACTS).write_text(json.dumps(facts, indent=2) + "\n")
    log.info("%s: the lab of seed %d on %s", folder, seed, model.name)
    return facts
