"""Make a natural lab: a folder with the files of the small lab and a base model of natural English.

The base model is made once below `models`, and every lab links to it; the lab's own seed determines its files.

model -> .../models/5m-0123456789ab/model   the base model (`spard_lab.lab.natural.base`)
train.jsonl, attack.jsonl, pool.jsonl, ...   as in `spard_lab.lab.make`; no duplicated or paraphrased pool
pool_benign.jsonl                            harmless requests with answers, for defenses that use benign rows
known_benign.jsonl                           harmless requests of the alignment split
labeled.jsonl                                replies whose harm is known, for `spard judge --labeled`
lab.json                                     the settings, digests of the files, words that attacks need
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spard_lab.lab.make import FACTS, FolderTaken, as_text, read_facts, temporary_folder
from spard_lab.lab.natural.base import BaseSettings, base_model
from spard_lab.lab.natural.corpus import make_files
from spard_lab.lab.natural.labeled import labeled_rows
from spard_lab.lab.natural.phrasing import OPENERS
from spard_lab.lab.natural.real import read_real
from spard_lab.lab.natural.splits import deal
from spard_lab.lab.natural.tasks import Task

log = logging.getLogger(__name__)


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
