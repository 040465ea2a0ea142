"""List the files that a job offers for download, with digests and the commands to verify, load and serve them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

from app.db.tables import JobStatus
from app.jobs.reports.page_rows import JobFile, PageJob
from app.jobs.rows import JobRow
from spard.release.archive import folder_name

_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that --max-lora-rank accepts


@dataclass(frozen=True, slots=True)
class Artifact:
    """One file: its name, download address, size in bytes and digest."""

    name: str
    href: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Lines:
    """Commands to run after the download, in the folder of the archive; `load` is Python.

    `beside` is the base model's folder, which must lie there too; empty if the hub has the model.
    """

    verify: str
    load: str
    serve: str
    beside: str = ""


@dataclass(frozen=True, slots=True)
class Artifacts:
    """The files of a job, and the commands for its adapter; `lines` is None while there is no adapter."""

    files: tuple[Artifact, ...]
    lines: Lines | None


def artifacts(kept: PageJob, left: Mapping[str, JobFile]) -> Artifacts:
    """List the files of a job that still exist; `left` maps their ids to files."""
    job, adapter = kept.row, kept.adapter if kept.row.status == JobStatus.succeeded else None
    own = adapter["storage_key"] if adapter else ""
    found = [
        Artifact(file.filename, f"/v1/files/{file.id}/content", file.bytes, file.sha256)
        for file in map(left.get, job.result_files or [])
        if file is not None and file.storage_key != own
    ]
    if adapter is None:
        return Artifacts(tuple(found), None)
    archive = Artifact(
        f"{job.id}-adapter.tar.gz", f"/v1/fine_tuning/jobs/{job.id}/adapter", adapter["bytes"], adapter["sha256"]
    )
    return Artifacts((archive, *found), _lines(job, archive.name))


def _lines(job: JobRow, archive: str) -> Lines:
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
    beside = "" if revision else PurePath(source).name  # the rest of the path is private to the provider
    base = beside or f"{source} --revision {revision}"
    rank = next((each for each in _VLLM_RANKS if each >= lora["rank"]), lora["rank"])
    options = f"--tokenizer {folder} --enable-lora --max-lora-rank {rank} --lora-modules tuned={folder}"
    return Lines(verify, load, f"vllm serve {base} {options}", beside)
