"""Fill a job's folder: download its files, check their digests, and restore the outputs of earlier attempts.

The digests of model files are cached in the worker, which passes them to its children. Children share no cache of their
own: one could write a wrong digest that the next child trusts.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Literal, cast

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

from app.db.tables import Job
from app.db.tables.job_records import KeptFile
from app.db.tables.job_spec import ASKED_OTHERWISE, AuditedRef, CorpusRef, JobSpec, ObjectRef, StartFrom
from app.db.tables.jobs import KEPT_CHECKPOINTS
from app.errors import AppError
from app.jobs import needs
from app.settings import Settings
from app.storage import ObjectMissing, Storage
from spard.config import DISGUISES_ALONE, Evidence, JudgeSpec, Recipe
from spard.config.earlier_versions import from_stored
from spard.config.run_spec import RunSpec, SuiteSpec, parse
from spard.digests import file_sha256, model_digest, model_file_name, model_files
from spard.models.folder.encoder import encoder_digest
from spard.release.archive import unpack
from worker import gpu
from worker.failures import BaseModelChanged, HubUnavailable, ModelMissing
from worker.workdir import Assignment, Folder, write_assignment

log = logging.getLogger(__name__)
_NAMED = ("id", "kind", "name", "version", "rows", "sha256", "lineage")
_START = "in/start.tar.gz"
_READINGS = 3  # downloads with a wrong digest before giving up
_JUDGE_ERRORS, _AGENT_ERRORS = Path("in/judge.json"), Path("in/agent.json")
_EVIDENCE = Path("in/evidence.json")
_Kind = Literal["harmful", "benign", "utility"]
_Source = ObjectRef | CorpusRef | StartFrom | AuditedRef
_MODEL_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
_SETTLED_NS = 2_000_000_000  # even coarse file system clocks give two writes that are this far apart different times
_KEPT_DIGESTS = 4096  # files


class Changed(AppError):
    """The digest of a stored object differs from the digest in the job spec."""

    code = "checksum_mismatch"


def fill(
    folder: Folder, job: Job, storage: Storage, settings: Settings, go_on: Callable[[], None], taken_until: int = 0
) -> None:
    """Download everything that the job needs into its folder and write its assignment.

    `go_on` is called between files and may raise to stop. `taken_until` is the last step with a stored checkpoint.
    Calling it again after a storage failure downloads only the files that are missing. Raises `Changed`,
    `StorageError`, and `ModelMissing`, `HubUnavailable` or `BaseModelChanged` for the base model.
    """
    inputs = _inputs(job.spec)
    for path, source in inputs.items():
        go_on()
        if not (folder.root / path).exists():
            _download(storage, source, folder.root / path)
    if _START in inputs and not folder.start.exists():
        unpack(folder.root / _START, folder.start)
    for kept in job.checkpoint["files"] if job.checkpoint else ():
        go_on()
        if not (folder.root / PurePosixPath(kept["path"])).exists():
            _restore(storage, kept, folder)
    if settings.judge_errors:
        shutil.copyfile(settings.judge_errors, folder.root / _JUDGE_ERRORS)
    if settings.agent_errors:
        shutil.copyfile(settings.agent_errors, folder.root / _AGENT_ERRORS)
    if job.spec.evidence_reference:
        (folder.root / _EVIDENCE).write_text(json.dumps(job.spec.evidence_reference))
    write_assignment(folder, _assignment(job, settings, taken_until))


def _inputs(spec: JobSpec) -> dict[str, _Source]:
    """Return the objects to download, by their path below the folder."""
    named = {
        "in/training.jsonl": spec.training_file,
        "in/validation.jsonl": spec.validation_file,
        "in/pool.jsonl": spec.pool,
        _START: spec.start_from or spec.audited,
    } | {_suite_path(i): suite for i, suite in enumerate(spec.suites)}
    return {path: source for path, source in named.items() if source is not None}


def _suite_path(i: int) -> str:
    return f"in/suites/{i}.jsonl"


def _download(storage: Storage, source: _Source, path: Path) -> None:
    if not _fetch(storage, source.storage_key, source.sha256, path):
        raise Changed(f"The bytes of {source.id} are no longer those that the job was made with.")


def _restore(storage: Storage, kept: KeptFile, folder: Folder) -> None:
    """Restore a file that an earlier attempt uploaded; skip a damaged or missing one, so that its stage runs again."""
    path = folder.root / PurePosixPath(kept["path"])
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if not _fetch(storage, kept["key"], kept["sha256"], path):
            log.warning("%s is damaged and left out", kept["path"])
    except ObjectMissing as error:
        log.warning("%s cannot be restored: %s", kept["path"], error)
        path.unlink(missing_ok=True)


def _fetch(storage: Storage, key: str, sha256: str, path: Path) -> bool:
    """Download an object; return False, and leave no file, if several downloads all have a wrong digest.

    It is worth trying again: a storage may answer once with old or damaged bytes, and then with the right ones.
    """
    for _ in range(_READINGS):
        if storage.download_file(key, path).sha256 == sha256:
            return True
        log.warning("the storage sent other bytes for %s than were stored", key)
        path.unlink()
    return False


def _assignment(job: Job, settings: Settings, taken_until: int) -> Assignment:
    spec, recipe = job.spec, _recipe(job, settings)
    run = RunSpec(
        model=_local_model(spec.model.source, spec.model.revision),
        training_file=Path("in/training.jsonl"),
        validation_file=Path("in/validation.jsonl") if spec.validation_file else None,
        pool=Path("in/pool.jsonl") if spec.pool else None,
        suites=_suites(spec.suites),
        recipe=recipe,
        judge=_judge(spec, settings),
        judge_errors=_JUDGE_ERRORS if settings.judge_errors else None,
        thresholds=spec.policy.thresholds(),
        public_name=job.model,
        start_from=Path("in/start") if spec.start_from else None,
        row_signal=spec.row_signal,
        further_tuning=spec.further_tuning,
        agent=spec.agent,
        agent_errors=_AGENT_ERRORS if spec.agent and settings.agent_errors else None,
        audit_engine=settings.audit_engine,
        encoder=_local_encoder(spec.embedder),
        held_out_rows=spec.held_out_rows,
        evidence=Evidence(spec.probe_steps, settings.probe_longer_audit),
        evidence_references=_EVIDENCE if spec.evidence_reference else None,
    )
    return Assignment(
        job.id,
        run,
        settings.cache_dir(),
        waived=spec.waived,
        provenance=_provenance(job),
        holds=spec.policy.waivers,
        processes=settings.gpus_per_job * settings.nodes_per_job,
        patience_s=settings.outage_patience_s,
        checkpoint_prompts=spec.checkpoint_prompts,
        taken_until=taken_until,
        kept_checkpoints=KEPT_CHECKPOINTS,
        keeps_transcripts=spec.transcripts,
        audits=spec.audited is not None,
        weights=_weights(job, run.model),
        pass_tokens=settings.pass_tokens,
        rendering=spec.model.rendering,
    )


def _weights(job: Job, model: str) -> dict[str, str]:
    """Return the digests of the base model's files; raise `BaseModelChanged` if they differ from the job's."""
    found, named = file_digests(model), job.spec.model
    if named.digest not in (None, model_digest(found)):
        cure = "put its files back, or add it again: spard models add"
        raise BaseModelChanged(f"The folder of the base model {named.alias} has changed since it was added; {cure}.")
    return found


def _recipe(job: Job, settings: Settings) -> Recipe:
    """Return the job's recipe for this worker: sharded as its settings say, if the model does not fit on one GPU.

    Weights in NF4 and 8-bit optimizer states cannot be sharded.
    """
    recipe: Recipe = parse(Recipe, from_stored(job.recipe), "recipe")
    if job.spec.version < ASKED_OTHERWISE:  # an older job keeps the audit that applied when it was created
        recipe = replace(recipe, audit=replace(recipe.audit, asking=DISGUISES_ALONE))
    is_plain = recipe.sharding == "none" and recipe.quantization == "none" and recipe.optimizer == "adamw"
    if is_plain and not needs.is_held(job, gpu.room(settings)):
        return replace(recipe, sharding=settings.sharding)
    return recipe


def _judge(spec: JobSpec, settings: Settings) -> JudgeSpec:
    """Return the job's judge with its files on this machine; where the row has only a name, settings give the rest."""
    return _at_hand(spec.judge_spec or replace(settings.judge, name=spec.judge))


def _at_hand(judge: JudgeSpec) -> JudgeSpec:
    """Return the judge with each classifier's model, also of its members, replaced by a local folder."""
    model = _local_model(judge.model, None) if judge.name == "classifier" else judge.model
    return replace(judge, model=model, members=tuple(_at_hand(member) for member in judge.members))


def _provenance(job: Job) -> dict[str, object]:
    """Return the job's inputs by name, version and digest, without paths or customers' names, for the manifest."""
    spec = job.spec
    return {
        "revision": spec.model.revision,
        "policy": asdict(spec.policy),
        "judge": spec.judge,
        "request_sha256": job.request_hash,
        "training_file": _named_fields(spec.training_file),
        "validation_file": _named_fields(spec.validation_file),
        "pool": _named_fields(spec.pool),
        "start_from": _named_fields(spec.start_from),
        "suites": [_named_fields(suite) for suite in spec.suites],
    }


def _named_fields(source: _Source | None) -> dict[str, object] | None:
    return None if source is None else {name: getattr(source, name) for name in _NAMED if hasattr(source, name)}


def _suites(suites: Iterable[CorpusRef]) -> tuple[SuiteSpec, ...]:
    """Return the job's suites with unique names, because results are keyed by name.

    Two suites of different kinds may share a name; the second one gets its kind appended.
    """
    found: dict[str, SuiteSpec] = {}
    for i, suite in enumerate(suites):
        name = suite.name if suite.name not in found else f"{suite.name} ({suite.kind})"
        found[name] = SuiteSpec(name, cast(_Kind, suite.kind), Path(_suite_path(i)))
    return tuple(found.values())


def _local_encoder(source: str | None) -> str | None:
    """Return the folder of the job's sentence encoder; None if the base model embeds the rows."""
    if source is None:
        return None
    name, _, commit = source.partition("@")
    return _local_model(source, None) if Path(source).is_absolute() else _local_model(name, commit or None)


def _local_model(source: str, revision: str | None) -> str:
    """Return the folder of a model; one from the hub is downloaded now, because children have no network.

    Raises `ModelMissing` if there is no such folder or revision, `HubUnavailable` if the hub does not answer.
    """
    if Path(source).is_dir():
        return source
    if Path(source).is_absolute():  # it was a folder when the provider offered the model
        raise ModelMissing(f"The folder {source} is not on this machine: mount it where the API has it.")
    try:
        return str(snapshot_download(source, revision=revision, allow_patterns=_MODEL_FILES))
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise ModelMissing(f"The hub has no {source} at {revision} for this machine: {error}") from error
    except (OSError, ValueError) as error:
        raise HubUnavailable(f"{source} at {revision} cannot be downloaded: {error}") from error


def file_digests(model: str) -> dict[str, str]:
    """Return the SHA-256 of each file that counts for a model's digest, by file name."""
    return {model_file_name(path): _file_digest(path.resolve()) for path in model_files(Path(model))}


def encoder_files_digest(folder: str) -> str:
    """Return the digest of a sentence encoder's folder, as `spard.models.folder.encoder` defines it."""
    return encoder_digest(Path(folder), lambda path: _file_digest(path.resolve()))


def _file_digest(path: Path) -> str:
    """Return a file's SHA-256, from the cache if inode, size and times are unchanged.

    The digest of a file written within the last 2 s is not cached: another write could leave the same times.
    """
    found = path.stat()
    if time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) < _SETTLED_NS:
        return file_sha256(path)
    return _cached_digest(path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))


@lru_cache(maxsize=_KEPT_DIGESTS)
def _cached_digest(path: Path, identity: tuple[int, ...]) -> str:
    return file_sha256(path)
