"""What a worker makes of a job's evidence: its reference comes along, and a passed job extends its base model's."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from app.db import transaction
from app.db.tables import BaseModelEntry
from app.db.tables.job_spec import JobSpec
from app.jobs import lease
from spard.config import Evidence
from spard.release.records import EvidenceRecord
from tests.narrowing import require
from tests.worker.heard import KEY, Heard
from tests.worker.shop import Shop
from worker import inputs
from worker.results import upload
from worker.workdir import Folder, new_folder, read_assignment

RECORD = EvidenceRecord("probe", 32, 0.75, 0.3, 0.4, 200, 180)


def publish(shop: Shop, folder: Folder, decision: str, record: EvidenceRecord | None) -> str:
    """Publish a job whose report has this decision and evidence; return its id."""
    report = json.loads(folder.safety.read_text())
    report["gate"] = {"decision": decision, "reasons": ["a reason"]}
    report["evidence"] = record and asdict(record)
    folder.safety.write_text(json.dumps(report))
    job_id = shop.add_job(waived=decision == "waived")
    with transaction(shop.engine) as session:
        claim = require(lease.claim(session, "worker", 60.0))
    write = upload(shop.storage, shop.job(job_id), claim, folder, KEY)
    with transaction(shop.engine) as session:
        assert write(session)
    return job_id


def offer(shop: Shop, digest: str | None = None) -> None:
    """Offer the base model of the shop's jobs."""
    model = shop.job_columns()["spec"].model
    with transaction(shop.engine) as session:
        session.merge(BaseModelEntry(alias=model.alias, source=model.source, digest=digest or model.digest))


def reference(shop: Shop) -> Any:
    with transaction(shop.engine) as session:
        return session.get_one(BaseModelEntry, shop.job_columns()["spec"].model.alias).evidence_reference


@pytest.fixture
def folder(finished_job: tuple[Folder, Heard], tmp_path: Path) -> Folder:
    made = Folder(tmp_path / "job")
    shutil.copytree(finished_job[0].root, made.root)
    return made


def test_a_passed_job_extends_the_reference_of_its_base_model_and_shows_its_evidence(
    shop: Shop, folder: Folder
) -> None:
    offer(shop)
    job_id = publish(shop, folder, "pass", RECORD)
    assert reference(shop) == {"comparable": "probe", "ratios": [0.75]}
    shown = require(shop.job(job_id).safety)["evidence"]
    assert shown == asdict(RECORD) | {"words": RECORD.sentence}
    publish(shop, folder, "pass", replace(RECORD, shift_ratio=0.5))
    assert reference(shop) == {"comparable": "probe", "ratios": [0.75, 0.5]}


@pytest.mark.parametrize("decision", ["fail", "inconclusive", "waived"])
def test_a_job_that_did_not_pass_is_no_reference(light_shop: Shop, folder: Folder, decision: str) -> None:
    offer(light_shop)
    publish(light_shop, folder, decision, RECORD)
    assert reference(light_shop) is None


@pytest.mark.parametrize("record", [None, EvidenceRecord("probe", 32, why_none="its loss was not finite")])
def test_a_job_without_a_ratio_is_no_reference(light_shop: Shop, folder: Folder, record: EvidenceRecord | None) -> None:
    offer(light_shop)
    publish(light_shop, folder, "pass", record)
    assert reference(light_shop) is None


def test_a_base_model_of_other_bytes_gets_no_ratio(light_shop: Shop, folder: Folder) -> None:
    offer(light_shop, "another digest")
    publish(light_shop, folder, "pass", RECORD)
    assert reference(light_shop) is None


def test_a_base_model_that_is_no_longer_offered_keeps_no_job_back(light_shop: Shop, folder: Folder) -> None:
    job_id = publish(light_shop, folder, "pass", RECORD)
    assert light_shop.job(job_id).status == "succeeded"


def test_the_reference_of_a_job_comes_along_with_its_probe(shop: Shop, tmp_path: Path) -> None:
    spec: JobSpec = shop.job_columns()["spec"]
    document: dict[str, object] = {"comparable": "probe", "ratios": [0.5]}
    probed = replace(spec, probe_steps=32, evidence_reference=document)
    for each, steps, known in ((spec, 0, None), (replace(spec, probe_steps=8), 8, None), (probed, 32, document)):
        job_id = shop.add_job(spec=each)
        with new_folder(tmp_path, job_id) as made:
            inputs.fill(made, shop.job(job_id), shop.storage, shop.settings(), lambda: None)
            run = read_assignment(made).run
            assert run.evidence == Evidence(steps, longer_audit=False)
            path = run.evidence_references
            assert (json.loads((made.root / path).read_text()) if path else None) == known
