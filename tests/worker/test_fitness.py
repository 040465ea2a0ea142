"""What keeps a worker from taking jobs, and what lets it take them again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event

import pytest

from app.db.tables import Job
from app.errors import Unfit
from app.settings import Settings
from spard.config import JudgeSpec
from tests.app.parts import SPEC
from tests.judge_server import judge_server
from worker.failures import DISK_FULL, OUT_OF_MEMORY, outer_failure
from worker.fitness import Fitness, check_disk, judge_answers, look
from worker.metrics import WorkerMetrics


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def fitness(tmp_path: Path, clock: Clock | None = None, *gpu_probe: str) -> tuple[Fitness, WorkerMetrics]:
    metrics, settings = WorkerMetrics(), Settings(data_dir=tmp_path, poll_s=0.01, gpu_probe_s=0.01)
    return Fitness(settings, metrics, {}, gpu_probe or ("/bin/true",), clock or Clock()), metrics


def make_job(source: Path) -> Job:
    return Job(spec=replace(SPEC, model=replace(SPEC.model, source=str(source))))


def trouble(metrics: WorkerMetrics, what: str) -> float | None:
    return metrics.registry.get_sample_value("spard_worker_trouble", {"what": what})


def test_a_base_model_that_is_mounted_later_is_taken_again(tmp_path: Path) -> None:
    found, metrics = fitness(tmp_path)
    found.note(
        outer_failure("model_missing"), make_job(tmp_path / "models" / "tiny"), look(str(tmp_path / "models" / "tiny"))
    )
    assert list(found.lacks()) == [str(tmp_path / "models" / "tiny")]
    assert trouble(metrics, "models") == 1
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    assert list(found.lacks()) == [str(tmp_path / "models" / "tiny")]  # an empty folder holds no model
    (tmp_path / "models" / "tiny" / "config.json").touch()
    assert list(found.lacks()) == []
    assert trouble(metrics, "models") == 0


def test_a_base_model_that_is_mounted_while_its_attempt_ends_is_taken_again(tmp_path: Path) -> None:
    found, _ = fitness(tmp_path)
    seen = look(str(tmp_path / "tiny"))
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").touch()
    found.note(outer_failure("model_missing"), make_job(tmp_path / "tiny"), seen)
    assert list(found.lacks()) == []


def test_a_base_model_that_could_not_be_loaded_is_tried_again_after_an_hour(tmp_path: Path) -> None:
    clock = Clock()
    found, _ = fitness(tmp_path, clock)
    found.note(outer_failure("model_not_found"), make_job(tmp_path), look(str(tmp_path)))
    clock.now = 3599.0
    assert found.lacks()
    clock.now = 3600.0
    assert not found.lacks()


def test_a_missing_model_keeps_a_worker_from_no_other_job(tmp_path: Path) -> None:
    found, metrics = fitness(tmp_path)
    found.note(outer_failure("model_missing"), make_job(tmp_path / "none"), look(str(tmp_path / "none")))
    found.await_fit(Event())
    assert metrics.is_fit


def test_a_worker_is_at_fault_when_its_probe_fails(tmp_path: Path) -> None:
    assert fitness(tmp_path, None, "/bin/false")[0].is_at_fault(outer_failure("gpu_error"))
    assert not fitness(tmp_path, None, "/bin/true")[0].is_at_fault(outer_failure("gpu_error"))
    assert not fitness(tmp_path)[0].is_at_fault(DISK_FULL)
    assert not fitness(tmp_path)[0].is_at_fault(OUT_OF_MEMORY)


def test_a_data_folder_that_cannot_be_used_is_the_worker_s(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert fitness(tmp_path / "file")[0].is_at_fault(DISK_FULL)


def test_a_folder_of_attempts_that_cannot_be_used_is_the_worker_s(tmp_path: Path) -> None:
    in_the_way = tmp_path / "work"
    in_the_way.touch()  # what another user owns, to root as well
    assert fitness(tmp_path)[0].is_at_fault(DISK_FULL)
    with pytest.raises(Unfit, match=f"{in_the_way} cannot be"):
        check_disk(Settings(data_dir=tmp_path))


def test_a_worker_waits_until_its_probe_passes_or_it_is_to_stop(tmp_path: Path) -> None:
    mended = tmp_path / "mended"
    found, metrics = fitness(tmp_path, None, "/usr/bin/test", "-e", str(mended))
    stop = Event()
    stop.set()
    found.note(outer_failure("gpu_error"), make_job(tmp_path), look(str(tmp_path)))
    found.await_fit(stop)
    mended.touch()
    found.note(outer_failure("gpu_error"), make_job(tmp_path), look(str(tmp_path)))
    found.await_fit(Event())
    assert (metrics.is_fit, trouble(metrics, "gpu")) == (True, 0)


@pytest.mark.parametrize(
    ("status", "works"), [(200, True), (429, False), (500, False), (503, False), (401, True), (404, True)]
)
def test_a_judge_is_asked_whether_it_answers(tmp_path: Path, status: int, works: bool) -> None:
    with judge_server() as server:
        server.answer = lambda body: (status, "yes")
        member = JudgeSpec("llm", server.url, "grader")
        job = make_job(tmp_path)
        job.spec = replace(job.spec, judge_spec=JudgeSpec("consensus", members=(member, JudgeSpec())))
        found, _ = fitness(tmp_path)
        found.note(outer_failure("judge_unavailable"), job, ())
        assert found.is_at_fault(outer_failure("judge_unavailable")) is not works
    assert len(server.requests) == 1  # a wrong key is for a job to find out: no waiting helps


def test_a_judge_that_nobody_listens_for_does_not_answer() -> None:
    assert not judge_answers(JudgeSpec("llm", "http://127.0.0.1:9/v1"), None)


def test_a_judge_without_an_address_is_asked_where_its_client_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    with judge_server() as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        assert judge_answers(JudgeSpec("llm", None, "grader"), None)
    assert len(server.requests) == 1


def test_a_rule_needs_no_endpoint(tmp_path: Path) -> None:
    assert not fitness(tmp_path)[0].is_at_fault(outer_failure("judge_unavailable"))
