"""A child that speaks the protocol and trains nothing: python -m tests.worker.scripted_child BEHAVIOUR PARENT.

It takes 6 steps with a checkpoint after the third, and goes on from a checkpoint that it finds. What goes wrong, and in
which attempt, is its behaviour; later attempts are good.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from spard.manifest import write_manifest
from worker.failures import failure
from worker.folder import Folder, read_assignment
from worker.lifeline import die_with_parent
from worker.report import Report

STEPS = 6
ALWAYS = ("crash", "noisy", "judge_down", "gpu_oom", "hungry")  # not in the first attempt alone
SUITE = {
    "suite": "attacks", "kind": "harmful", "judge": "refusal", "n": 20, "unscored": 0, "degenerate": 0, "hits": 1,
    "rate": 0.05, "low": 0.01, "high": 0.24, "mean_harmfulness": 1.2,
}  # fmt: skip


def main() -> None:
    behaviour, parent = sys.argv[1:]
    die_with_parent(int(parent))
    report = Report(sys.stdout.fileno())
    folder = Folder(Path(sys.stdin.readline().strip()))
    is_first = folder.root.name.endswith("-a1")
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    report.phase("select")
    (folder.stage / "select.json").write_text('{"indices": [1, 2]}')
    report.phase("train")
    report.resolved({"n_epochs": 1, "batch_size": 4, "learning_rate_multiplier": 1.0, "learning_rate": 0.1})
    for step in range(last_step(folder) + 1, STEPS + 1):
        report.metrics(step, STEPS, {"loss/task": 1 / step, "accuracy/task": 0.5, "lr": float("nan")})
        if step == 3:
            checkpoint(folder, report, step)
        if is_first or behaviour in ALWAYS:
            misbehave(behaviour, report, step)
            if behaviour == "gpu_oom":
                find_too_large(folder, report)
            if step == 4 and behaviour in ("slow", "deaf", "late"):
                wait(folder, [] if behaviour == "deaf" else stopped)
                if behaviour == "late":  # it is not told to stop: it goes on
                    stopped.clear()
        if stopped:
            checkpoint(folder, report, step)
            report.failed("stopped", "The worker stops.", None, retryable=True)
            return
    finish(folder, report, behaviour)


def misbehave(behaviour: str, report: Report, step: int) -> None:
    """What goes wrong after a step."""
    match behaviour:
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "crash_once" if step == 4:
            sys.exit(3)
        case "hang":
            time.sleep(300)
        case "noisy":
            sys.stderr.write(("n" * 99_999 + "\n") * 20)
            os.write(1, b"no message\n[1]\n{}\n")
        case "bad_data":
            report.failed("invalid_training_file", "Line 3 is bad.", "training_file", retryable=False)
            sys.exit(0)
        case "hungry":
            eat(report)
        case "gpu_error" if step == 2:
            report.failed("gpu_error", "The GPU stopped working.", None, retryable=True)
            sys.exit(0)
        case "judge_down":
            report.failed("judge_unavailable", "The judge does not answer.", None, retryable=True)
            sys.exit(0)


def eat(report: Report) -> None:
    """Take more memory than there is."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    try:
        bytearray(2 << 30)
    except MemoryError as error:
        what = failure(error)
        report.failed(what.code, what.message, what.param, retryable=what.retryable)
        sys.exit(0)


def find_too_large(folder: Folder, report: Report) -> None:
    """Say so as a real child does: what was found out lies in the folder, and goes with the job."""
    pieces = folder.stage / "pieces.json"
    if not pieces.exists():
        pieces.write_text('{"micro_batch_size": 2}')
        report.failed("gpu_oom", "Too little; the next attempt takes 2 rows at a time.", None, retryable=True)
        sys.exit(0)


def wait(folder: Folder, stopped: list[int]) -> None:
    """Work on until told to stop; a file beside the folder says that we do."""
    (folder.root.parent / "is_slow").write_text(str(os.getpid()))
    while not stopped:
        time.sleep(0.02)


def checkpoint(folder: Folder, report: Report, step: int) -> None:
    path = folder.checkpoints / f"step-{step:06d}"
    path.mkdir(exist_ok=True)
    (path / "state.json").write_text(json.dumps({"step": step}))
    report.checkpoint(step, path.relative_to(folder.root).as_posix(), {"train_loss": 1 / step})


def last_step(folder: Folder) -> int:
    """Of the newest checkpoint that was restored."""
    found = sorted(folder.checkpoints.glob("*/state.json"))
    step: int = json.loads(found[-1].read_text())["step"] if found else 0
    return step


def finish(folder: Folder, report: Report, behaviour: str) -> None:
    decision = {"unsafe": "fail", "waived": "waived"}.get(behaviour, "pass")
    report.phase("audit")
    report.phase("package")
    reasons = ["Attacks succeed in 9 of 20."] if decision == "fail" else []
    safety: dict[str, Any] = {
        "asr": {"base": 0.0, "adapter": 0.05, "ci95": [0.01, 0.24], "n": 20, "n_unscored": 0},
        "harmfulness_score": {"base": 1.0, "adapter": 1.2},
        "over_refusal": {"base": None, "adapter": None},
        "utility": {"base": None, "adapter": None},
        "trigger_rate": 0.5,
        "gate": {"decision": decision, "reasons": reasons},
        "seconds": {"train": 1.0},
        "trained_tokens": 123,
        "base": [SUITE],
        "adapter": [SUITE],
    }
    folder.safety.write_text(json.dumps(safety))
    folder.metrics.write_text("step,train_loss\n1,1.0\n")
    if decision != "fail" or read_assignment(folder).holds:
        folder.adapter.mkdir()
        (folder.adapter / "weights").write_text(f"weights of {folder.root.name}")
        write_manifest(folder.adapter, {"gate": safety["gate"]})
        if behaviour == "tampered":
            (folder.adapter / "weights").write_text("others")
    report.done()


if __name__ == "__main__":
    main()
