"""Metric sinks: what trackers are told, and that none of them can harm or hold up a job."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from app.errors import Unfit
from app.settings import Settings
from worker.sinks import SINKS
from worker.sinks.base import RunFacts
from worker.sinks.feed import Feed, Sinks, check, environment

REPORT = {
    "asr": {"base": 0.0, "adapter": 0.05, "n": 40},
    "over_refusal": {"base": 0.1, "adapter": 0.1},
    "utility": {"base": None, "adapter": None},
    "gate": {"decision": "pass"},
}
FACTS = {"model": "lab", "seed": 3}
# Each stands for a tracker's package, with the part of its interface that is used; it writes down what it is told.
STUBS = {
    "wandb": """
import json, os
def note(*what): open(os.environ["SPARD_SINK_TEST"], "a").write(json.dumps(what) + "\\n")
class Settings:
    def __init__(self, **more): pass
class Summary:
    def update(self, figures): note("audit", figures)
class Run:
    summary = Summary()
    def log(self, metrics, step): note("step", step, metrics)
    def finish(self, exit_code): note("end", exit_code)
def init(*, id, resume, project, entity, name, tags, config, dir, settings):
    note("begin", id, resume, project, entity, name, tags, config)
    return Run()
""",
    "trackio": """
import json, os
def note(*what): open(os.environ["SPARD_SINK_TEST"], "a").write(json.dumps(what) + "\\n")
def init(*, project, name, resume, config, embed): note("begin", name, resume, project, None, None, None, config)
def log(metrics, step=None): note("audit" if step is None else "step", *([] if step is None else [step]), metrics)
def finish(): note("end", 0)
""",
    "mlflow": """
import json, os
from types import SimpleNamespace as New
def note(*what): open(os.environ["SPARD_SINK_TEST"], "a").write(json.dumps(what) + "\\n")
class MlflowClient:
    def get_experiment_by_name(self, name): return None
    def create_experiment(self, name): self.project = name; return "7"
    def search_runs(self, experiments, filter_string, max_results): return []
    def create_run(self, experiment, tags, run_name):
        note("begin", tags["spard.job_id"], "allow", self.project, None, run_name, None, {"model": "lab", "seed": 3})
        return New(info=New(run_id="r"))
    def log_batch(self, run_id, metrics=(), params=()):
        if metrics: note("step", metrics[0].step, {m.key: m.value for m in metrics})
    def set_tag(self, run_id, key, value): note("audit", {key: value})
    def set_terminated(self, run_id, status): note("end", 0 if status == "FINISHED" else 1)
""",
}
ENTITIES = """
class Metric:
    def __init__(self, key, value, timestamp, step): self.key, self.value, self.step = key, value, step
class Param:
    def __init__(self, key, value): pass
"""


def facts(folder: Path, **more: Any) -> RunFacts:
    return RunFacts(id="ftjob-1", name="mine", folder=str(folder), params=FACTS, **more)


def feed(folder: Path, name: str, timeout_s: float = 60.0, command: Sequence[str] | None = None) -> Feed:
    return Feed(name, facts(folder), timeout_s, command)


def run(folder: Path, made: Feed) -> None:
    """One job's messages."""
    sinks = Sinks([made])
    sinks.step(1, {"loss/task": 0.7, "rewards/margins": None, "lr": 0.1})
    sinks.step(2, {"loss/task": 0.5, "rewards/margins": 0.25})
    (folder / "safety.json").write_text(json.dumps(REPORT))
    sinks.hear_end(folder / "safety.json", {"kind": "done"})
    sinks.close()
    made.thread.join(60)
    assert not made.thread.is_alive()


@pytest.mark.parametrize("name", STUBS)
def test_a_tracker_is_told_steps_audit_and_end(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packages" / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STUBS[name])
    (package / "entities.py").write_text(ENTITIES)
    monkeypatch.setenv("SPARD_SINK_TEST", str(tmp_path / "told"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'packages'}:{Path.cwd()}")

    with capture_logs() as logs:
        run(tmp_path, feed(tmp_path, name))

    assert logs == []
    begin, one, two, *audit, end = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert begin[:2] == ["begin", "ftjob-1"]
    assert (begin[3], begin[-1]) == ("spard", FACTS)
    assert one == ["step", 1, {"train_loss": 0.7, "lr": 0.1}]
    assert two == ["step", 2, {"train_loss": 0.5, "rewards/margins": 0.25}]
    told = {key: value for each in audit for key, value in each[-1].items()}
    assert told["safety/asr/adapter"] == 0.05
    assert "pass" in told.values()
    assert "safety/utility/base" not in told
    assert end == ["end", 0]


def test_tensorboard_writes_its_event_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, feed(tmp_path, "tensorboard"))

    found = EventAccumulator(str(tmp_path / "tensorboard" / "ftjob-1"))
    found.Reload()
    assert [event.step for event in found.Scalars("train_loss")] == [1, 2]
    assert found.Scalars("safety/asr/adapter")[0].value == pytest.approx(0.05)


BROKEN = {
    "missing": [sys.executable, "-c", "import no_such_tracker"],
    "no program": ["/no/such/program"],
    "failing": [sys.executable, "-c", "import sys; sys.stdin.readline(); print('no quota'); sys.exit(3)"],
}


@pytest.mark.parametrize("command", BROKEN.values(), ids=BROKEN)
def test_a_broken_sink_is_logged_and_left_behind(command: list[str], tmp_path: Path) -> None:
    with capture_logs() as logs:
        run(tmp_path, feed(tmp_path, "wandb", command=command))
    assert [log["event"] for log in logs] == ["a metric sink did not take everything"]
    assert logs[0]["error"]


def test_an_unknown_sink_is_no_more_than_a_broken_one(tmp_path: Path) -> None:
    with capture_logs() as logs:
        run(tmp_path, feed(tmp_path, "no_such_sink"))
    assert "no_such_sink" in logs[0]["error"]


def test_a_sink_that_hangs_holds_nobody_up_and_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    made = feed(tmp_path, "wandb", timeout_s=0.2, command=command)
    with capture_logs() as logs:
        run_all(made)
        made.thread.join(60)
    assert not made.thread.is_alive()
    assert "a metric sink is ended: it takes too long" in [log["event"] for log in logs]


def run_all(made: Feed) -> None:
    """More than its pipe and its queue can hold."""
    sinks = Sinks([made])
    for step in range(20_000):
        sinks.step(step, {"loss/task": 0.5})
    sinks.close()


def test_a_sink_gets_its_own_variables_and_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "w")
    monkeypatch.setenv("SPARD_DATABASE_URL", "postgresql://secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    assert environment()["WANDB_API_KEY"] == "w"
    assert not any(name.startswith(("SPARD_D", "AWS_")) for name in environment())


def test_a_report_that_cannot_be_read_is_for_others_to_tell(tmp_path: Path) -> None:
    made = feed(tmp_path, "wandb", command=[sys.executable, "-c", "import sys; sys.stdin.read()"])
    sinks = Sinks([made])
    sinks.step(1, {"loss/task": 0.5})
    sinks.hear_end(tmp_path / "none.json", {"kind": "done"})
    sinks.close()
    made.thread.join(60)


@pytest.mark.parametrize("name", ["sinks", "integrations"])
def test_a_worker_refuses_a_tracker_that_nobody_knows(name: str) -> None:
    check(Settings().model_copy(update={name: ("tensorboard", "wandb")}))
    with pytest.raises(Unfit, match=f"SPARD_{name.upper()} names 'wandbb': it should be one of mlflow"):
        check(Settings().model_copy(update={name: ("tensorboard", "wandbb")}))


def test_there_are_none_unless_the_provider_turns_them_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (Settings().sinks, Settings().integrations) == (None, None)
    monkeypatch.setenv("SPARD_SINKS", "tensorboard, mlflow")
    assert Settings().sinks == ("tensorboard", "mlflow")
    assert set(SINKS.names()) >= {"mlflow", "tensorboard", "trackio", "wandb"}
