"""What a worker makes of a job that shows whether its task was learned."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from app.db import transaction
from app.db.tables.job_spec import JobSpec
from app.jobs import lease
from app.settings import Settings
from tests.narrowing import require
from tests.worker.heard import KEY, Heard, read_report
from tests.worker.shop import Shop
from worker import inputs
from worker.results import upload
from worker.workdir import Folder, new_folder, read_assignment


def test_the_folder_has_the_replies_and_the_manifest_the_counts(finished_job: tuple[Folder, Heard]) -> None:
    folder, report = finished_job[0], read_report(finished_job[0])
    replies = [json.loads(line) for line in folder.task_replies.read_text().splitlines()]
    manifest = json.loads((folder.adapter / "manifest.json").read_text())
    assert [each["line"] for each in replies] == [1, 2, 3, 4, 5]  # of the validation file
    assert report["task_check"] == manifest["task_check"]
    assert (report["task_check"]["source"], report["task_check"]["replies"]) == ("validation_file", 5)
    assert report["seconds"]["task"] > 0


def test_the_upload_has_the_replies_and_the_job_shows_the_losses(
    finished_job: tuple[Folder, Heard], shop: Shop, tmp_path: Path
) -> None:
    folder = Folder(tmp_path / "job")
    shutil.copytree(finished_job[0].root, folder.root)
    job_id = shop.add_job(waived=True)
    with transaction(shop.engine) as session:
        claim = require(lease.claim(session, "worker", 60.0))
    write = upload(shop.storage, shop.job(job_id), claim, folder, KEY)
    with transaction(shop.engine) as session:
        assert write(session)

    job = shop.job(job_id)
    key = f"{require(job.report_key).rpartition('/')[0]}/task_replies.jsonl"
    assert b"".join(shop.storage.chunks(key)) == folder.task_replies.read_bytes()
    shown, report = require(job.safety)["task_check"], read_report(folder)
    assert {name: shown[name] for name in ("base", "adapter")} == report["validation"]
    assert f"{report['validation']['base']['loss']:.2f} nats a token before" in shown["words"]


def test_a_job_of_before_trains_on_every_row(shop: Shop, tmp_path: Path) -> None:
    """Its spec says nothing of rows that are held out."""
    spec: JobSpec = shop.job_columns()["spec"]
    job_id, other = shop.add_job(), shop.add_job(spec=replace(spec, held_out_rows=100))
    for each, most in ((job_id, 0), (other, 100)):
        assert _read_limit(shop, each, shop.settings(), tmp_path) == most


def _read_limit(shop: Shop, job_id: str, settings: Settings, folder: Path) -> int:
    with new_folder(folder, job_id) as made:
        inputs.fill(made, shop.job(job_id), shop.storage, settings, lambda: None)
        return read_assignment(made).run.held_out_rows
