"""Fills a job's folder: the files it names, held against the digests of its row, and what earlier attempts finished."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import snapshot_download

from app.errors import AppError
from app.models import Job
from app.settings import Settings
from app.storage import Storage, StorageError
from spard.archive import unpack
from spard.config import GateThresholds, JudgeSpec, Recipe
from spard.errors import InvalidModel
from spard.recipe import RunSpec, SuiteSpec, parse
from worker.folder import Assignment, Folder, write_assignment

log = logging.getLogger(__name__)

_NAMED = ("id", "kind", "name", "version", "rows", "sha256", "lineage")
_THRESHOLDS = [each.name for each in fields(GateThresholds)]
_START = "in/start.tar.gz"
_MODEL_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


class Changed(AppError):
    """An object's bytes are not those that the job was made with."""

    code = "checksum_mismatch"


def fill(folder: Folder, job: Job, storage: Storage, settings: Settings, go_on: Callable[[], None]) -> None:
    """Bring everything that the job needs into its folder; `go_on` is called between files, and may raise."""
    inputs = _inputs(job)
    for path, source in inputs.items():
        go_on()
        _download(storage, source, folder.root / path)
    if _START in inputs:
        unpack(folder.root / _START, folder.start)
    for kept in (job.checkpoint or {}).get("files", []):
        go_on()
        _restore(storage, kept, folder)
    write_assignment(folder, _assignment(job, settings))


def _inputs(job: Job) -> dict[str, dict[str, Any]]:
    """Path below the folder -> the object to download."""
    spec = job.spec
    found = {"in/training.jsonl": spec["training_file"]}
    if spec.get("validation_file"):
        found["in/validation.jsonl"] = spec["validation_file"]
    if spec.get("pool"):
        found["in/pool.jsonl"] = spec["pool"]
    if spec.get("start_from"):
        found[_START] = spec["start_from"]
    return found | {_suite_path(i): suite for i, suite in enumerate(spec["suites"])}


def _suite_path(i: int) -> str:
    return f"in/suites/{i}.jsonl"


def _download(storage: Storage, source: dict[str, Any], path: Path) -> None:
    stored = storage.download_file(source["storage_key"], path)
    if stored.sha256 != source["sha256"]:
        raise Changed(f"The bytes of {source.get('id', path.stem)} are no longer those that the job was made with.")


def _restore(storage: Storage, kept: dict[str, Any], folder: Folder) -> None:
    """A piece that is damaged is left out: what it held is worked out again."""
    path = folder.root / PurePosixPath(kept["path"])
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        stored = storage.download_file(kept["key"], path)
    except StorageError as error:
        log.warning("%s cannot be restored: %s", kept["path"], error)
    else:
        if stored.sha256 == kept["sha256"]:
            return
        log.warning("%s is damaged and left out", kept["path"])
    path.unlink(missing_ok=True)


def _assignment(job: Job, settings: Settings) -> Assignment:
    spec = job.spec
    model, policy = spec["model"], spec["policy"]
    recipe: Recipe = parse(Recipe, job.recipe, "recipe")
    run = RunSpec(
        model=_local_model(model["source"], model.get("revision")),
        training_file=Path("in/training.jsonl"),
        validation_file=Path("in/validation.jsonl") if spec.get("validation_file") else None,
        pool=Path("in/pool.jsonl") if spec.get("pool") else None,
        suites=_suites(spec["suites"]),
        recipe=recipe,
        judge=JudgeSpec(name=spec["judge"], base_url=settings.judge_base_url, model=settings.judge_model),
        thresholds=GateThresholds(**{name: policy[name] for name in _THRESHOLDS if name in policy}),
        public_name=job.model,
        start_from=Path("in/start") if spec.get("start_from") else None,
    )
    return Assignment(
        job.id,
        run,
        settings.cache_dir(),
        waived=bool(spec.get("waived")),
        provenance=_provenance(job),
        holds=bool(policy.get("waivers")),
        processes=settings.gpus_per_job,
    )


def _provenance(job: Job) -> dict[str, Any]:
    """What was asked for, by name, version and digest; no place of ours, and no name of a customer's."""
    spec = job.spec
    return {
        "revision": spec["model"].get("revision"),
        "policy": spec["policy"],
        "judge": spec["judge"],
        "request_sha256": job.request_hash,
        **{name: _named(spec.get(name)) for name in ("training_file", "validation_file", "pool")},
        "start_from": _named(spec.get("start_from")),
        "suites": [_named(suite) for suite in spec["suites"]],
    }


def _named(source: dict[str, Any] | None) -> dict[str, Any] | None:
    return source and {name: source[name] for name in _NAMED if name in source}


def _suites(suites: list[dict[str, Any]]) -> tuple[SuiteSpec, ...]:
    """Suites of two kinds may have one name; results are told apart by it, so the second one gets its kind's too."""
    found: dict[str, SuiteSpec] = {}
    for i, suite in enumerate(suites):
        name = suite["name"] if suite["name"] not in found else f"{suite['name']} ({suite['kind']})"
        found[name] = SuiteSpec(name, suite["kind"], Path(_suite_path(i)))
    return tuple(found.values())


def _local_model(source: str, revision: str | None) -> str:
    """A folder as it is; a hub id as the folder that its pinned revision is downloaded to. Children stay offline."""
    if Path(source).is_dir():
        return source
    try:
        return str(snapshot_download(source, revision=revision, allow_patterns=_MODEL_FILES))
    except (OSError, ValueError) as error:
        log.warning("%s at %s cannot be downloaded: %s", source, revision, error)
        raise InvalidModel(
            "the base model cannot be downloaded; the provider's log has the details", "model"
        ) from error
