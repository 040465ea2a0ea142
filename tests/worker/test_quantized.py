"""Jobs in NF4 beside jobs in full precision on one machine, and the later audit of what one of them released."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app.db import transaction
from app.db.tables import LaterAudit
from app.jobs import later_audits
from spard.config import Audit
from spard.config.quantization import OFFERED, Quantization
from spard.config.run_spec import to_mapping
from spard.data.rows import prompt_text, read_pool
from spard.models.base import load_base
from spard.selection.embeddings import embed
from tests.spard.parts import write_model
from tests.worker.heard import Work, read_report
from tests.worker.parts import RECIPE, job_folder
from tests.worker.shop import Shop
from tests.worker.test_later_audit import audit_it, publish
from worker import pipeline
from worker.protocol import Report
from worker.workdir import Folder

NF4 = replace(RECIPE, quantization=OFFERED)
HELD: tuple[Quantization, ...] = ("none", OFFERED)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with layers that NF4 has whole blocks of."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny", hidden_size=64, intermediate_size=128, head_dim=16)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[Quantization, Folder]:
    """The same job twice on one machine with one cache, in full precision and then in NF4."""
    root = tmp_path_factory.mktemp("jobs")
    done = {}
    for held in HELD:
        told = os.open(root / f"{held}.messages", os.O_CREAT | os.O_WRONLY)
        folder = job_folder(root / held, model, recipe=replace(RECIPE, quantization=held))
        pipeline.run(folder, Report(told), lambda: False)
        os.close(told)
        done[held] = folder
    return done


def test_neither_takes_what_the_cache_has_of_the_other(jobs: dict[Quantization, Folder], model: Path) -> None:
    cache = jobs["none"].root.parent / "cache"
    cached = [load_file(path)["rows"] for path in (cache / "embeddings").glob("*.safetensors")]
    texts = [prompt_text(row) for row in read_pool(jobs["none"].root / "in" / "pool.jsonl")]
    made = [embed(load_base(model, device="cpu", quantization=held), texts) for held in HELD]
    assert len(cached) == len(made) == 2
    assert not torch.equal(*made)
    assert all(any(torch.equal(own, each) for each in cached) for own in made)

    audits = [path.name for path in (cache / "audits").glob("*.json")]
    assert len(audits) == 2 * len(read_report(jobs["none"])["base"])
    manifests = [json.loads((each.adapter / "manifest.json").read_text()) for each in jobs.values()]
    assert manifests[1]["base_digest"] == f"{manifests[0]['base_digest']}+{OFFERED}"


def test_a_later_audit_asks_the_base_model_in_nf4_too(
    jobs: dict[Quantization, Folder], light_shop: Shop, work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(later_audits, "AUDITS", {"full": Audit(max_new_tokens=4)})
    recipe: Any = to_mapping(NF4)
    job_id = publish(light_shop, jobs[OFFERED], tmp_path / "adapter.tar.gz", recipe=recipe)
    with transaction(light_shop.engine) as session:
        asked = later_audits.ask_by_name(session, light_shop.key.id, job_id, 0, light_shop.settings())
    _, ending, stage = audit_it(light_shop, work)
    with transaction(light_shop.engine) as session:
        assert ending(session)
        facts = json.loads(session.get_one(LaterAudit, asked.id).record or "")

    assert facts["base_digest"] == f"{load_base(light_shop.model).digest}+{OFFERED}"
    assert stage["weights"] == json.loads((jobs[OFFERED].stage / "audit.json").read_text())["weights"]
