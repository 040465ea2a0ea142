"""What a child finds in its folder."""

from __future__ import annotations

from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from app.db.tables import Job
from app.db.tables.job_records import KeptFile
from app.db.tables.job_spec import ModelRef, StartFrom
from app.jobs.needs import Room
from app.storage import Storage, StoredObject
from spard.config import DISGUISES_ALONE, Asking, Audit, JudgeSpec
from spard.config.earlier_versions import to_stored
from spard.release.archive import archive
from tests.worker.parts import RECIPE, TRAINING, lines
from tests.worker.shop import Shop
from worker import gpu
from worker.failures import HubUnavailable, ModelMissing, failure
from worker.inputs import Changed, fill
from worker.listener import Cancelled
from worker.workdir import Assignment, Folder, new_folder, read_assignment


def fill_job(shop: Shop, **changes: Any) -> tuple[Job, Assignment, bytes]:
    """The row, what the child reads of it, and its training file."""
    job = shop.job(shop.add_job(waived=True))
    job.spec = replace(job.spec, **changes)
    with new_folder(shop.folder, "job-a1") as folder:
        fill(folder, job, shop.storage, shop.settings(), lambda: None)
        assignment = read_assignment(folder)
        return job, assignment, assignment.run.training_file.read_bytes()


def test_the_child_reads_what_the_row_says(light_shop: Shop) -> None:
    job, assignment, training = fill_job(light_shop)
    assert (assignment.job_id, assignment.waived, assignment.run.recipe) == (job.id, True, RECIPE)
    assert assignment.run.thresholds == job.spec.policy.thresholds()
    assert training == lines(TRAINING)


def test_the_manifest_names_the_base_model_as_the_customer_does(light_shop: Shop) -> None:
    assert fill_job(light_shop)[1].run.public_name == "tiny"


def test_the_judge_is_the_one_that_the_job_was_made_with(light_shop: Shop, tmp_path: Path) -> None:
    guard = JudgeSpec(name="classifier", family="llama_guard", model=str(tmp_path))
    members = (guard, JudgeSpec(name="llm", base_url="http://127.0.0.1:9/v1"))
    judge = JudgeSpec(name="consensus", members=members)
    assert fill_job(light_shop, judge="consensus", judge_spec=judge)[1].run.judge == judge


@pytest.mark.parametrize(
    ("needed", "there", "sharding"),
    [(10, 80, "none"), (100, 80, "full"), (None, 80, "full"), (10, None, "full")],
    ids=["held by one GPU", "held by none", "of unknown need", "on a CPU"],
)
def test_a_model_is_cut_over_gpus_where_one_is_not_known_to_hold_it(
    light_shop: Shop, monkeypatch: pytest.MonkeyPatch, needed: int | None, there: int | None, sharding: str
) -> None:
    monkeypatch.setattr(gpu, "room", lambda settings: Room(there, 2))
    job = light_shop.job(light_shop.add_job(memory_bytes=needed))
    with new_folder(light_shop.folder, "job-a1") as folder:
        fill(folder, job, light_shop.storage, light_shop.settings(gpus_per_job=2, sharding="full"), lambda: None)
        assert read_assignment(folder).run.recipe.sharding == sharding


@pytest.mark.parametrize("most", [None, 512])
def test_the_child_is_told_how_many_tokens_go_through_the_model_at_once(light_shop: Shop, most: int | None) -> None:
    job = light_shop.job(light_shop.add_job())
    with new_folder(light_shop.folder, "job-a1") as folder:
        fill(folder, job, light_shop.storage, light_shop.settings(pass_tokens=most), lambda: None)
        assert read_assignment(folder).pass_tokens == most


@pytest.mark.parametrize(("version", "asking"), [(2, DISGUISES_ALONE), (3, Asking())])
def test_a_job_is_audited_as_was_promised_when_it_was_made(light_shop: Shop, version: int, asking: Asking) -> None:
    job = light_shop.job(light_shop.add_job(recipe=to_stored(asdict(replace(RECIPE, audit=Audit())))))
    job.spec = replace(job.spec, version=version)
    with new_folder(light_shop.folder, "job-a1") as folder:
        fill(folder, job, light_shop.storage, light_shop.settings(), lambda: None)
        assert read_assignment(folder).run.recipe.audit.asking == asking


def test_a_job_that_knows_its_judge_by_name_takes_the_rest_from_the_settings(light_shop: Shop) -> None:
    job = light_shop.job(light_shop.add_job())
    job.spec = replace(job.spec, version=1, judge="llm", judge_spec=None)
    settings = light_shop.settings(judge=JudgeSpec(base_url="http://127.0.0.1:9/v1", model="judge-1"))
    with new_folder(light_shop.folder, "job-a1") as folder:
        fill(folder, job, light_shop.storage, settings, lambda: None)
        judge = read_assignment(folder).run.judge
    assert judge == JudgeSpec(name="llm", base_url="http://127.0.0.1:9/v1", model="judge-1")


def test_suites_of_one_name_are_told_apart(light_shop: Shop) -> None:
    prompts = lines([{"prompt": "Hurt."}])
    suites = tuple(light_shop.put_corpus("all", kind, prompts) for kind in ("harmful", "benign"))
    run = fill_job(light_shop, suites=suites)[1].run
    assert [each.name for each in run.suites] == ["all", "all (benign)"]


def test_what_is_cancelled_is_not_downloaded(light_shop: Shop) -> None:
    def cancel() -> None:
        raise Cancelled

    job = light_shop.job(light_shop.add_job())
    with new_folder(light_shop.folder, "job-a1") as folder, pytest.raises(Cancelled):
        fill(folder, job, light_shop.storage, light_shop.settings(), cancel)


def test_a_model_that_cannot_be_downloaded_is_told_without_its_source(light_shop: Shop) -> None:
    model = ModelRef(alias="tiny", source="secret-org/secret-model", revision="main")
    with pytest.raises(HubUnavailable) as error:
        fill_job(light_shop, model=model)
    assert "secret" not in failure(error.value).message


def test_a_folder_that_is_not_mounted_here_is_no_fault_of_the_customer_s(light_shop: Shop, tmp_path: Path) -> None:
    model = ModelRef(alias="tiny", source=str(tmp_path / "elsewhere"))
    with pytest.raises(ModelMissing) as error:
        fill_job(light_shop, model=model)
    assert (failure(error.value).param, "elsewhere" in failure(error.value).message) == (None, False)


def test_an_adapter_to_go_on_from_is_unpacked_beside_the_files(light_shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    for name in ("adapter_config.json", "manifest.json"):
        (tmp_path / "adapter" / name).write_text("{}")
    archive(tmp_path / "adapter", tmp_path / "adapter.tar.gz", "ftjob-1-adapter")
    stored = light_shop.put("adapter", (tmp_path / "adapter.tar.gz").read_bytes())
    before = StartFrom(
        id=stored.id, sha256=stored.sha256, storage_key=stored.storage_key, lineage=("ftjob-0", stored.id)
    )
    job = light_shop.job(light_shop.add_job())
    job.spec = replace(job.spec, start_from=before)

    with new_folder(light_shop.folder, "job-a1") as folder:
        fill(folder, job, light_shop.storage, light_shop.settings(), lambda: None)
        assignment = read_assignment(folder)

        assert assignment.run.start_from == folder.start
        assert (folder.start / "adapter_config.json").read_text() == "{}"
    named = {"id": "adapter", "sha256": before.sha256, "lineage": ["ftjob-0", "adapter"]}
    assert assignment.provenance["start_from"] == named


def test_an_adapter_with_other_bytes_is_refused(light_shop: Shop) -> None:
    stored = light_shop.put("adapter", b"other")
    changed = StartFrom(id=stored.id, sha256="0" * 64, storage_key=stored.storage_key)
    with pytest.raises(Changed):
        fill_job(light_shop, start_from=changed)


def read_wrongly(storage: Storage, monkeypatch: pytest.MonkeyPatch, part: str, times: int) -> list[str]:
    """Let the first readings of keys with `part` have other bytes of the same length; return the keys so read."""
    download, read = storage.download_file, list[str]()

    def download_wrongly(key: str, path: Path) -> StoredObject:
        stored = download(key, path)
        if part not in key or len(read) == times:
            return stored
        read.append(key)
        path.write_bytes(b"?" * stored.bytes)
        return StoredObject(stored.bytes, sha256(b"?" * stored.bytes).hexdigest())

    monkeypatch.setattr(storage, "download_file", download_wrongly)
    return read


def test_an_object_whose_first_readings_are_wrong_is_read_again(
    light_shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = read_wrongly(light_shop.storage, monkeypatch, "training", times=2)
    kept: KeptFile = {"key": "inputs/kept", "path": "stage/kept", "sha256": sha256(b"kept").hexdigest()}
    light_shop.put("kept", b"kept")
    job = light_shop.job(light_shop.add_job())
    job.checkpoint = {"step": 1, "files": [kept]}
    with new_folder(light_shop.folder, "job-a1") as folder:
        fill(folder, job, light_shop.storage, light_shop.settings(), lambda: None)
        assert (folder.root / "in/training.jsonl").read_bytes() == light_shop.content("inputs/training")
        (folder.root / "stage/kept").unlink()
        more = read_wrongly(light_shop.storage, monkeypatch, "kept", times=2)
        fill(folder, job, light_shop.storage, light_shop.settings(), lambda: None)
        assert (folder.root / "stage/kept").read_bytes() == b"kept"
    assert (len(wrong), len(more)) == (2, 2)


def test_an_object_that_is_always_wrong_is_refused_and_leaves_no_file(
    light_shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_wrongly(light_shop.storage, monkeypatch, "training", times=100)
    job = light_shop.job(light_shop.add_job())
    with new_folder(light_shop.folder, "job-a1") as folder:
        with pytest.raises(Changed):
            fill(folder, job, light_shop.storage, light_shop.settings(), lambda: None)
        assert not (folder.root / "in/training.jsonl").exists()


def test_paths_in_the_folder_are_relative(light_shop: Shop) -> None:
    job = light_shop.job(light_shop.add_job())
    with new_folder(light_shop.folder, "job-a1") as folder:
        fill(folder, job, light_shop.storage, light_shop.settings(), lambda: None)
        moved = Folder(folder.root.rename(light_shop.folder / "moved"))
        assert read_assignment(moved).run.training_file.exists()
