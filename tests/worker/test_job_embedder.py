"""A job's sentence encoder on its worker: where its files are, who reads them, and whose vectors are stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from app.db.tables import Job
from spard.models.folder.encoder import encoder_digest
from tests.spard.encoder_folders import write_encoder
from tests.worker.parts import RECIPE
from tests.worker.shop import Shop
from worker.embedding_shards import EmbeddingShards
from worker.failures import ModelMissing
from worker.inputs import encoder_files_digest, fill
from worker.sandbox import allowed_paths
from worker.workdir import new_folder, read_assignment


def make_job(shop: Shop, source: Path) -> Job:
    """Return a job whose recipe has the encoder's name, and whose spec has its folder."""
    job = shop.job(shop.add_job())
    job.recipe["selection"] = {**job.recipe["selection"], "embedder": source.name}
    job.spec = replace(job.spec, embedder=str(source))
    return job


def test_a_child_reads_the_encoder_and_reports_have_its_name_alone(light_shop: Shop, tmp_path: Path) -> None:
    encoder = write_encoder(tmp_path / "mini")
    job = make_job(light_shop, encoder)
    with new_folder(light_shop.folder, "job-a1") as folder:
        fill(folder, job, light_shop.storage, light_shop.settings(), lambda: None)
        run = read_assignment(folder).run
        assert (run.encoder, run.recipe.selection.encoder) == (str(encoder), "mini")
        assert str(encoder) in allowed_paths(folder).readable


def test_vectors_are_stored_under_the_encoder_s_digest(light_shop: Shop, tmp_path: Path) -> None:
    encoder = write_encoder(tmp_path / "mini")
    assert encoder_files_digest(str(encoder)) == encoder_digest(encoder)
    job = make_job(light_shop, encoder)
    with new_folder(light_shop.folder, "job-a1") as folder:
        fill(folder, job, light_shop.storage, light_shop.settings(), lambda: None)
        shards = EmbeddingShards(light_shop.storage, light_shop.engine, job, folder)
        assert shards._base == encoder_digest(encoder)


def test_an_encoder_that_is_not_on_the_worker_is_named(light_shop: Shop, tmp_path: Path) -> None:
    job = make_job(light_shop, tmp_path / "gone")
    with (
        new_folder(light_shop.folder, "job-a1") as folder,
        pytest.raises(ModelMissing, match="gone is not on this machine"),
    ):
        fill(folder, job, light_shop.storage, light_shop.settings(), lambda: None)


def test_a_job_from_before_there_were_embedders_compares_the_states_as_they_are(light_shop: Shop) -> None:
    job = light_shop.job(light_shop.add_job())
    job.recipe["selection"].pop("embedder", None)
    with new_folder(light_shop.folder, "job-a1") as folder:
        fill(folder, job, light_shop.storage, light_shop.settings(), lambda: None)
        found = read_assignment(folder).run.recipe.selection
    assert found == replace(RECIPE.selection, embedder="states")
