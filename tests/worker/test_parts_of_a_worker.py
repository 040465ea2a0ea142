"""The smaller parts of a worker: what a child may know, what is kept, what is reported, who lives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from pydantic import SecretStr
from structlog.testing import capture_logs

from app.settings import Settings
from app.storage import Storage
from spard.config import JudgeSpec, cpu
from spard.errors import InvalidRecipe
from spard.isolation.sandbox import Sandbox
from spard.models.base import default_dtype
from tests.worker.shop import wait_until
from worker.judge_calls import llm_judges
from worker.process import Child, environment
from worker.protocol import Report, parse
from worker.results import Discard, Keeper, delete_kept
from worker.sandbox import ChildSandbox
from worker.workdir import Folder, new_folder


def test_a_child_knows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "SPARD_DATABASE_URL", "SPARD_ADMIN_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "canary")
    settings = Settings(
        database_url=SecretStr("canary"), judge_api_key=SecretStr("canary"), admin_key=SecretStr("canary")
    )
    assert "canary" not in environment(settings).values()


def test_a_judge_s_key_stays_with_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_KEY", "canary")
    members = (JudgeSpec(name="llm"), JudgeSpec(name="llm", api_key_env="OTHER_KEY"), JudgeSpec())
    settings = Settings(judge=JudgeSpec(name="consensus", members=members), judge_api_key=SecretStr("canary"))
    assert "canary" not in environment(settings).values()
    assert [ChildSandbox.from_settings(settings).key_of(each) for each in llm_judges(settings.judge)] == [
        "canary",
        "canary",
    ]


def test_a_child_has_the_threads_that_the_provider_gives_it() -> None:
    assert environment(Settings(worker_threads=3))["OMP_NUM_THREADS"] == "3"


def test_a_child_reads_models_in_the_dtype_that_the_provider_chose(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPARD_CPU_DTYPE", environment(Settings())["SPARD_CPU_DTYPE"])
    assert default_dtype(torch.device("cpu")) == torch.float32
    monkeypatch.setenv("SPARD_CPU_DTYPE", environment(Settings(cpu_dtype="bfloat16"))["SPARD_CPU_DTYPE"])
    assert default_dtype(torch.device("cpu")) == torch.bfloat16
    assert default_dtype(torch.device("cuda")) == torch.bfloat16
    monkeypatch.setenv("SPARD_CPU_DTYPE", environment(Settings(cpu_dtype="auto"))["SPARD_CPU_DTYPE"])
    for flags, dtype in (("fma avx512_bf16", torch.bfloat16), ("fma avx512f", torch.float32)):
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: {flags}\n")
        monkeypatch.setattr(cpu, "CPU_FACTS", tmp_path / "cpuinfo")
        assert default_dtype(torch.device("cpu")) == dtype
    monkeypatch.setattr(cpu, "CPU_FACTS", tmp_path / "none")  # a system that does not say
    assert default_dtype(torch.device("cpu")) == torch.float32
    monkeypatch.setenv("SPARD_CPU_DTYPE", "half")
    with pytest.raises(InvalidRecipe, match="must be one of float32, bfloat16"):
        default_dtype(torch.device("cpu"))


def test_a_child_s_lines_keep_their_level() -> None:
    lines = ["INFO lab: begins", "WARNING lab: a row is short", "ERROR lab: it failed", "Traceback: a library's"]
    code = f"import sys; sys.stderr.write({chr(10).join(lines)!r})"
    with capture_logs() as logged:
        child = Child([sys.executable, "-P", "-c", code], environment(Settings()), ChildSandbox(Sandbox("none")))
        wait_until(lambda: len([entry for entry in logged if entry["event"] == "child"]) == len(lines))
        child.kill()
    levels = {entry["line"]: entry["log_level"] for entry in logged if entry["event"] == "child"}
    assert levels == dict(zip(lines, ["info", "warning", "error", "info"], strict=True))


def test_a_child_is_offline() -> None:
    assert environment(Settings())["HF_HUB_OFFLINE"] == "1"


def test_a_process_for_the_cpu_sees_no_gpu_and_one_for_a_gpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    training, serving = Settings(device="cpu"), Settings(device="cuda", serving_device="cuda")
    seen = [environment(training), environment(training, "cuda"), environment(serving), environment(serving, "cpu")]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen] == ["", "3", "3", ""]


def test_the_parent_never_loads_torch() -> None:
    code = "import sys, worker.__main__; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_child_whose_parent_is_gone_ends_at_once() -> None:
    code = "from app.ops.processes import die_with_parent; die_with_parent(1); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


@pytest.mark.parametrize("line", [b"", b"text", b"[1]", b"{}", b'{"kind": 1}', b"\xff"])
def test_what_is_no_message_is_none(line: bytes) -> None:
    assert parse(line) is None


def test_numbers_that_json_does_not_know_become_null(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        Report(out.fileno()).metrics(1, 2, {"a": float("nan"), "b": float("inf"), "c": 1.0})
    message = parse((tmp_path / "out").read_bytes())
    assert message is not None
    assert message["data"] == {"a": None, "b": None, "c": 1.0}


def test_a_folder_is_gone_after_use(tmp_path: Path) -> None:
    with new_folder(tmp_path, "job-a1") as folder:
        assert folder.stage.is_dir()
    assert list(tmp_path.iterdir()) == []


def make_states(folder: Folder, *steps: int) -> list[Path]:
    paths = [folder.resume_states / f"step-{step:06d}" for step in steps]
    for path in paths:
        path.mkdir(parents=True)
        (path / "manifest.json").write_text(path.name)
    return paths


def make_discard(storage: Storage) -> Discard:
    """Deletes at once, without rows."""

    def discard(keys: Sequence[str]) -> None:
        for key in keys:
            storage.delete(key)

    return discard


def test_the_newest_two_checkpoints_are_kept(storage: Storage, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "job")
    keeper = Keeper(storage, "jobs/1/a1", folder, None, make_discard(storage))
    for step, path in zip((3, 6, 9), make_states(folder, 3, 6, 9), strict=True):
        assert keeper.keep_state(step, path)
    assert [file["path"] for file in keeper.record["files"]] == [
        "checkpoints/step-000006/manifest.json",
        "checkpoints/step-000009/manifest.json",
    ]
    assert keeper.record["step"] == 9


def test_an_old_checkpoint_is_deleted_only_after_the_row_was_written(storage: Storage, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "job")
    keeper = Keeper(storage, "jobs/1/a1", folder, None, make_discard(storage))
    for step, path in zip((3, 6, 9), make_states(folder, 3, 6, 9), strict=True):
        keeper.keep_state(step, path)
    before = storage.exists("jobs/1/a1/checkpoints/step-000003/manifest.json")
    keeper.delete(keeper.take_surplus())
    assert (before, storage.exists("jobs/1/a1/checkpoints/step-000003/manifest.json")) == (True, False)


def test_a_checkpoint_that_is_gone_is_not_kept(storage: Storage, tmp_path: Path) -> None:
    keeper = Keeper(storage, "jobs/1/a1", Folder(tmp_path), None, make_discard(storage))
    assert not keeper.keep_state(3, tmp_path / "checkpoints" / "step-000003")


def test_a_stage_is_kept_once(storage: Storage, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.stage.mkdir()
    (folder.stage / "select.json").write_text("{}")
    keeper = Keeper(storage, "jobs/1/a1", folder, None, make_discard(storage))
    assert [keeper.keep_stages(), keeper.keep_stages()] == [True, False]


def test_nothing_kept_stays_after_the_job(storage: Storage, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    keeper = Keeper(storage, "jobs/1/a1", folder, None, make_discard(storage))
    keeper.keep_state(3, make_states(folder, 3)[0])
    delete_kept(keeper.record["files"], make_discard(storage))
    assert not storage.exists("jobs/1/a1/checkpoints/step-000003/manifest.json")
