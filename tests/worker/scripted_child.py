"""A child that speaks the protocol and trains nothing: python -m tests.worker.scripted_child BEHAVIOR PARENT.

It takes 6 steps with a resume state after the third, and goes on from a resume state that it finds; `long` takes
`LONG` with one after each, `judged` asks the job's judge when it has trained, and `embeds` begins with a shard of the
pool's embeddings. `steady FOLDER` takes a while for each step, and finds its disk full as long as FOLDER has a file
`full`. Every second step ends an epoch, if the job is to have checkpoints. What goes wrong, and in which
attempt, is its behavior; later attempts are good.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.ops.processes import die_with_parent
from spard.config import GateThresholds
from spard.config.patience import Patience
from spard.config.run_spec import to_mapping
from spard.digests import write_manifest
from spard.errors import JudgeUnavailable
from spard.evaluation.gate import gate
from spard.evaluation.results import SuiteResult
from worker.failures import failure
from worker.judge_calls import Asking, llm_judges
from worker.protocol import Report, parse_prefetch
from worker.workdir import Folder, read_assignment

STEPS = 6
LONG = 400 if os.environ.get("SPARD_SOAK") == "1" else 100  # steps of a long job, each with a checkpoint
LONG_S = 0.1  # the time of each
STEADY, STEADY_S = "steady ", 0.2  # the behavior before its folder, and the time of each of its steps
REPLIES = 8
BEST = 4  # the step that a job ends with which keeps the best end of an epoch
KEEPS_BEST = ("best", "best_is_unsafe")
ALWAYS = ("crash", "killed", "noisy", "judge_down", "gpu_oom", "hungry")  # not in the first attempt alone
SUITE = {
    "suite": "attacks", "kind": "harmful", "judge": "refusal", "n": 20, "unscored": 0, "degenerate": 0, "hits": 1,
    "rate": 0.05, "low": 0.01, "high": 0.24, "mean_harmfulness": 1.2,
}  # fmt: skip


def main() -> None:
    behavior, parent = sys.argv[1:]
    die_with_parent(int(parent))
    report = Report(sys.stdout.fileno())
    told = sys.stdin.readline().strip()
    while parse_prefetch(told):  # it reads nothing ahead
        told = sys.stdin.readline().strip()
    folder = Folder(Path(told))
    is_first = folder.root.name.endswith("-a1")
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    if behavior == "embeds":
        embed(folder, report)
    report.stage("select")
    fill_disk(behavior, "selection", report, is_first)
    (folder.stage / "select.json").write_text('{"indices": [1, 2]}')
    report.stage("train")
    report.report_resolved({"n_epochs": 1, "batch_size": 4, "learning_rate_multiplier": 1.0, "learning_rate": 0.1}, 100)
    steps = LONG if behavior == "long" else STEPS
    for step in range(last_step(folder) + 1, steps + 1):
        report.metrics(step, steps, {"loss/task": 1 / step, "accuracy/task": 0.5, "lr": float("nan")})
        if behavior == "long" or behavior.startswith(STEADY):
            time.sleep(LONG_S if behavior == "long" else STEADY_S)
        if step == 3:
            fill_disk(behavior, "resume state", report, is_first)
        if step == 3 or behavior == "long" or (behavior == "judged" and step == steps):
            save(folder, report, step)
        if step in (2, 4) or (step == STEPS and behavior in KEEPS_BEST):
            end_epoch(folder, report, step, behavior)
        if is_first or behavior in ALWAYS:
            misbehave(behavior, report, step)
            if behavior == "gpu_oom":
                find_too_large(folder, report)
            if step == 4 and behavior in ("slow", "deaf", "late", "unaudited"):
                wait(folder, [] if behavior == "deaf" else stopped)
                if behavior == "late":  # it is not told to stop: it goes on
                    stopped.clear()
        if stopped:
            save(folder, report, step)
            if folder.audit_last.exists():
                end_epoch(folder, report, 4, "shown again")
            report.report_failed("stopped", "The worker stops.", None, retryable=True)
            return
    if behavior == "judged":
        ask_judge(folder, report)
    fill_disk(behavior, "adapter", report, is_first)
    finish(folder, report, behavior)


def fill_disk(behavior: str, place: str, report: Report, is_first: bool) -> None:
    """Find no room on the disk at a place, and report it as a real child does."""
    is_full = behavior.startswith(STEADY) and Path(behavior.removeprefix(STEADY), "full").exists()
    if is_full or (behavior == f"full at the {place}" and is_first):
        report_error(report, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def report_error(report: Report, error: Exception) -> None:
    """Report an exception as a real child does, and end."""
    what = failure(error)
    report.report_failed(what.code, what.message, what.param, retryable=what.retryable)
    sys.exit(0)


def embed(folder: Folder, report: Report) -> None:
    """Have a shard in the cache, and say whose it is."""
    path = read_assignment(folder).cache_dir / "embeddings" / f"{'0' * 64}.safetensors"
    is_new = not path.exists()
    if is_new:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(os.getpid()))
    report.report_cached(f"embeddings/{path.name}", is_new)
    report.event(f"embedded by {path.read_text()}", {})


def misbehave(behavior: str, report: Report, step: int) -> None:
    """What goes wrong after a step."""
    match behavior:
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crash_once" if step == 4:
            sys.exit(3)
        case "hang":
            time.sleep(300)
        case "noisy":
            sys.stderr.write(("n" * 99_999 + "\n") * 20)
            os.write(1, b"no message\n[1]\n{}\n")
        case "bad_data":
            report.report_failed("invalid_training_file", "Line 3 is bad.", "training_file", retryable=False)
            sys.exit(0)
        case "hungry":
            eat(report)
        case "gpu_error" if step == 2:
            report.report_failed("gpu_error", "The GPU stopped working.", None, retryable=True)
            sys.exit(0)
        case "judge_down":
            report.report_failed("judge_unavailable", "The judge does not answer.", None, retryable=True)
            sys.exit(0)


def eat(report: Report) -> None:
    """Take more memory than there is."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    try:
        bytearray(2 << 30)
    except MemoryError as error:
        report_error(report, error)


def find_too_large(folder: Folder, report: Report) -> None:
    """Say so as a real child does: what was found out lies in the folder, and goes with the job."""
    pieces = folder.stage / "pieces.json"
    if not pieces.exists():
        pieces.write_text('{"micro_batch_size": 2}')
        report.report_failed("gpu_oom", "Too little; the next attempt takes 2 rows at a time.", None, retryable=True)
        sys.exit(0)


def wait(folder: Folder, stopped: list[int]) -> None:
    """Work on until told to stop; a file in the folder says that we do."""
    (folder.root / "is_slow").touch()
    while not stopped:
        time.sleep(0.02)


def end_epoch(folder: Folder, report: Report, step: int, behavior: str) -> None:
    """Leave a checkpoint as a real child does, unless an earlier attempt has: the adapter only where it passed."""
    assignment = read_assignment(folder)
    if assignment.checkpoint_prompts is None or step <= assignment.taken_until:
        return
    if behavior == "unaudited":
        report.checkpoint(step, metrics(step), None, has_adapter=False)
        return
    passed, is_again = behavior != "unsafe_epochs", behavior == "shown again"
    if passed:
        adapter = folder.epochs / f"step-{step:06d}" / "adapter"
        adapter.mkdir(parents=True)
        (adapter / "weights").write_text(f"weights of step {step}")
        write_manifest(adapter, {"checkpoint": {"step": step}})
    found = safety("pass" if passed else "fail")
    report.checkpoint(step, metrics(step), found, has_adapter=passed, is_shown_again=is_again)


def metrics(step: int) -> dict[str, float]:
    return {"train_loss": 1 / step, "full_valid_loss": 2 / step}


def safety(decision: str) -> dict[str, Any]:
    return {
        "gate": {"decision": decision, "reasons": ["Attacks succeed in 9 of 20."] if decision == "fail" else []},
        "asr": {"base": 0.0, "adapter": 0.05, "ci95": [0.01, 0.24], "n": 20, "n_unscored": 0},
        "harmfulness_score": {"base": 1.0, "adapter": 1.2},
        "over_refusal": {"base": None, "adapter": None},
        "utility": {"base": None, "adapter": None},
    }


def save(folder: Folder, report: Report, step: int) -> None:
    path = folder.resume_states / f"step-{step:06d}"
    path.mkdir(exist_ok=True)
    (path / "state.json").write_text(json.dumps({"step": step}))
    report.resume_state(step, path.relative_to(folder.root).as_posix())


def last_step(folder: Folder) -> int:
    """Of the newest resume state that was restored."""
    found = sorted(folder.resume_states.glob("*/state.json"))
    step: int = json.loads(found[-1].read_text())["step"] if found else 0
    return step


def ask_judge(folder: Folder, report: Report) -> None:
    """Ask the job's judge about some replies as a real child does: through the worker, and patiently."""
    from spard.evaluation.judges import open_judge, use_chat  # loads torch
    from spard.evaluation.judges.wrappers import PatientJudge

    def wait(seconds: float) -> None:
        report.waiting("judge")
        time.sleep(seconds)

    assignment = read_assignment(folder)
    asking = Asking(report, sys.stdin.fileno(), llm_judges(assignment.run.judge))
    try:
        with use_chat(asking.open):
            judge = PatientJudge(open_judge(assignment.run.judge), Patience(assignment.patience_s), wait)
            judge.judge(["Hurt."] * REPLIES, [f"This is reply {i}." for i in range(REPLIES)])
    except JudgeUnavailable as error:
        report_error(report, error)


def finish(folder: Folder, report: Report, behavior: str) -> None:
    decisions = {"unsafe": "fail", "failed_at_the_end": "fail", "waived": "waived", "undecided": "inconclusive"}
    decision = (decisions | {"best_is_unsafe": "fail", "above_its_limit": "inconclusive"}).get(behavior, "pass")
    report.stage("audit")
    report.stage("package")
    audited = safety(decision)
    if behavior == "above_its_limit":
        before = SuiteResult(
            "attacks", "harmful", "refusal", 400, 0, 0, 0, 0.0, 0.0, 0.01, categories=(("fraud", 0, 20),)
        )
        after = replace(before, hits=3, rate=3 / 400, categories=(("fraud", 3, 20),))
        audited["gate"] = to_mapping(gate([before], [after], GateThresholds()))
    found: dict[str, Any] = audited | {
        "checkpoints": [{"epoch": 3, "step": STEPS, "metrics": metrics(STEPS), **audited}],
        "trigger_rate": 0.5,
        "audit_version": 2,
        "seconds": {"train": 1.0},
        "trained_tokens": 123,
        "base": [SUITE],
        "adapter": [SUITE],
    }
    if behavior in KEEPS_BEST:
        ending = {"keep": "best", "released_epoch": 2, "released_step": BEST, "trained_epochs": 3, "planned_epochs": 3}
        found["ending"] = ending | {"why": "all_epochs"}
        found["checkpoints"].insert(0, {"epoch": 2, "step": BEST, "metrics": metrics(BEST), **audited})
    folder.safety.write_text(json.dumps(found))
    folder.metrics.write_text("step,train_loss\n1,1.0\n")
    if decision != "fail" or read_assignment(folder).holds:
        folder.adapter.mkdir()
        (folder.adapter / "weights").write_text(f"weights of {folder.root.name}")
        write_manifest(folder.adapter, {"gate": audited["gate"]})
        if behavior == "tampered":
            (folder.adapter / "weights").write_text("others")
    report.report_done()


if __name__ == "__main__":
    main()
