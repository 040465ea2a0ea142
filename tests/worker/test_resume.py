"""A real child that is killed while it trains: the adapter is the one of an undisturbed run, and its plots say so."""

from __future__ import annotations

import io
import re
import tarfile
from dataclasses import asdict, replace
from pathlib import Path

import psutil
from structlog.testing import capture_logs

from app.db import read
from app.db.tables import JobStatus
from app.jobs.reports import gather as reports
from app.jobs.reports.gather import report_page
from spard.config import Hyperparameters, Lora
from tests.narrowing import require
from tests.worker.parts import RECIPE, job_folder
from tests.worker.running import run_here
from tests.worker.shop import Shop, at_work, wait_until
from worker.worker import Worker

RESTLESS = replace(
    RECIPE,
    lora=Lora(rank=2, dropout=0.1),
    hyperparameters=Hyperparameters(n_epochs=16, batch_size=4),
    checkpoint_every_s=0.01,
)


def test_a_killed_child_s_adapter_is_that_of_an_undisturbed_run(light_shop: Shop, model: Path, tmp_path: Path) -> None:
    job_id = light_shop.add_job(waived=True, recipe=asdict(RESTLESS))
    with capture_logs() as logged, at_work(Worker(light_shop.settings(warm_child=True))):
        wait_until(lambda: is_resumable(light_shop, job_id))
        kill_trainer()
        job = light_shop.until_ended(job_id)
    assert (job.status, job.attempt) == (JobStatus.succeeded, 2)
    steps = [event.split("/")[0] for event in light_shop.events(job_id) if event.startswith("Step ")]
    assert steps.count("Step 1") == 1
    assert weights(light_shop.content(require(job.adapter)["storage_key"])) == undisturbed_adapter(model, tmp_path)
    said = "\n".join(entry["line"] for entry in logged if entry["event"] == "child")
    first, second = re.findall(r"training .* parameters, (\d+) of 96 steps are done", said)
    assert (first, marked_steps(light_shop, job_id)) == ("0", [int(second)])
    assert "FutureWarning" not in said


def is_resumable(shop: Shop, job_id: str) -> bool:
    """Whether the job's row names a resume state, so that all of its files are stored."""
    kept = shop.job(job_id).checkpoint
    return kept is not None and kept["step"] is not None


def marked_steps(shop: Shop, job_id: str) -> list[int]:
    """The steps after which the plot of the training on the report's page says that it was taken up again."""
    with read(shop.engine) as session:
        gathered = reports.gather(session, shop.key.project_id, job_id)
    plots = re.findall(
        r"<title>taken up again after step (\d+)</title>", report_page(reports.read(shop.storage, gathered))
    )
    return sorted({int(step) for step in plots})


def kill_trainer() -> None:
    """The older child: the other one waits for work."""
    running = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    children = [child for child in running if "worker.child" in child.cmdline()]
    min(children, key=lambda child: child.create_time()).kill()


def undisturbed_adapter(model: Path, tmp_path: Path) -> bytes:
    folder = job_folder(tmp_path / "undisturbed", model, recipe=RESTLESS)
    run_here(folder)
    return (folder.adapter / "adapter_model.safetensors").read_bytes()


def weights(archive: bytes) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        member = tar.extractfile(next(name for name in tar.getnames() if name.endswith("adapter_model.safetensors")))
        assert member
        return member.read()
