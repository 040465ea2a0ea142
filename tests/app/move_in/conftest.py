"""An account with three jobs, a service, and the command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.move_in.api import Api
from spard.commands import main
from tests.app.move_in.openai_stub import Stub, row, serve_stub

HERE_KEY = "sk-another-key-of-tests"
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """Jobs that succeeded, failed and were cancelled, with events on several pages."""
    stub = Stub(page=2)
    train = stub.add_file("train.jsonl", b"".join(row(f"What is {i}?", f"It is {i}.") for i in range(12)))
    valid = stub.add_file("../valid set.jsonl", b"".join(row(f"And {i}?", f"Also {i}.") for i in range(4)))
    metrics = stub.add_file("metrics.csv", b"step,train_loss\n1,0.5\n", "fine-tune-results")
    stub.add_file("essay.txt", b"nobody's business", "assistants")
    stub.add_job("ftjob-a", train, validation_file=valid, result_files=[metrics], suffix="shop")
    stub.add_job("ftjob-b", train, status="failed", fine_tuned_model=None)
    stub.add_job("ftjob-c", train, status="cancelled", fine_tuned_model=None)
    stub.events["ftjob-a"] = [{"id": f"ftevent-{i}", "message": f"Step {i}"} for i in range(5)]
    stub.checkpoints["ftjob-a"] = [{"id": f"ftckpt_{i}", "step_number": i} for i in range(3)]
    with serve_stub(stub):
        monkeypatch.setenv("OPENAI_BASE_URL", stub.url)
        monkeypatch.setenv("OPENAI_API_KEY", stub.key)
        yield stub


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    with serve_stub(Stub(key=HERE_KEY)) as stub:
        monkeypatch.setenv("SPARD_BASE_URL", stub.url)
        monkeypatch.setenv("SPARD_API_KEY", stub.key)
        yield stub


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that commands would have waited."""
    waited: list[float] = []
    monkeypatch.setattr(Api, "wait", lambda self, seconds: waited.append(seconds))
    return waited


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "move"


@pytest.fixture
def run(folder: Path, waits: list[float], capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a subcommand in the folder; its exit code and all that it printed."""

    def command(name: str, *arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["move-in", name, str(folder), *arguments])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out + captured.err

    return command
