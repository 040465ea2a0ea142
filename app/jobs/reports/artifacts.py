"""What a job leaves to be taken away: files with their digests, and the lines that verify, load and serve them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.db.tables import DeletedModel, File, Job, JobStatus
from spard.release.archive import folder_name

_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what its --max-lora-rank may be


@dataclass(frozen=True, slots=True)
class Artifact:
    """One file: its name, where it is downloaded, its size and its digest."""

    name: str
    href: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Lines:
    """What to type after the download, from the folder that it lies in; `load` is Python.

    `beside` is the folder of the base model, which has to lie there too; empty where the hub has it.
    """

    verify: str
    load: str
    serve: str
    beside: str = ""


@dataclass(frozen=True, slots=True)
class Artifacts:
    """The files of a job, and what to do with its adapter; None while there is none to take."""

    files: tuple[Artifact, ...]
    lines: Lines | None


def artifacts(session: Session, job: Job) -> Artifacts:
    """Look up the files that a job has left and that are still there."""
    rows = session.scalars(select(File).where(File.project_id == job.project_id, File.id.in_(job.result_files or [])))
    adapter = job.adapter if job.status == JobStatus.succeeded and session.get(DeletedModel, job.id) is None else None
    own = adapter["storage_key"] if adapter else ""
    found = [
        Artifact(row.filename, f"/v1/files/{row.id}/content", row.bytes, row.sha256)
        for row in rows
        if row.storage_key != own
    ]
    if adapter is None:
        return Artifacts(tuple(found), None)
    archive = Artifact(
        f"{job.id}-adapter.tar.gz", f"/v1/fine_tuning/jobs/{job.id}/adapter", adapter["bytes"], adapter["sha256"]
    )
    return Artifacts((archive, *found), _lines(job, archive.name))


def _lines(job: Job, archive: str) -> Lines:
    folder, lora = folder_name(job.id), job.recipe["lora"]
    verify = f"spard verify {archive} --key-set signing_keys.json\ntar xzf {archive}"
    kind = "AutoModelForCausalLM" if lora is None else "AutoPeftModelForCausalLM"
    load = (
        f"from {'transformers' if lora is None else 'peft'} import {kind}\nfrom transformers import AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{folder}")\nmodel = {kind}.from_pretrained("{folder}")'
    )
    if lora is None:
        return Lines(verify, load, f"vllm serve {folder}")
    source, revision = job.spec.model.source, job.spec.model.revision
    beside = "" if revision else PurePath(source).name  # where it lies is the provider's
    base = beside or f"{source} --revision {revision}"
    rank = next((each for each in _VLLM_RANKS if each >= lora["rank"]), lora["rank"])
    options = f"--tokenizer {folder} --enable-lora --max-lora-rank {rank} --lora-modules tuned={folder}"
    return Lines(verify, load, f"vllm serve {base} {options}", beside)
