"""The safety report as a typed record."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

from spard.config import GateThresholds, ResolvedNumbers
from spard.evaluation.results import SuiteResult
from spard.release.records import RiskyRow, RowSignalRecord
from spard.release.report import (
    AttackSuccess,
    BaseAndAdapter,
    GateRecord,
    SafetyReport,
    SelectedRows,
    ValidationLoss,
)

RESULT = SuiteResult("harmful", "harmful", "refusal", 20, 0, 0, 1, 0.05, 0.01, 0.24, mean_harmfulness=1.2)
REPORT = SafetyReport(
    job_id="ftjob-1",
    base_model="tiny",
    base_digest="sha256:0",
    recipe={"seed": 5, "lora": None},
    resolved=ResolvedNumbers(1, 4, 1.0, 2e-3),
    micro_batch_size=2,
    thresholds=GateThresholds(),
    data_sha256={"training": "0"},
    trained_tokens=100,
    steps=6,
    tau={"mean": 1.5},
    trigger_rate=0.5,
    triggered_steps=3,
    validation={"base": ValidationLoss(1.0, 0.5, 10)},
    gate=GateRecord("fail", ("Attacks succeed.",)),
    base=(RESULT,),
    adapter=(RESULT,),
    asr=AttackSuccess(0.05, 0.05, (0.01, 0.24), 20, 0),
    harmfulness_score=BaseAndAdapter(1.2, 1.2),
    seconds={"train": 1.0},
    selected=SelectedRows((3, 1), (0.5, 0.25), (1.0, None), 1, ((0.0, 1.0), (1.0, 0.0))),
    risky_rows=(RiskyRow(1, 0.5, 0.5, 3, ("encoded_text",), "Add 1 and 2.", 0.6),),
    row_signal=RowSignalRecord("drop", 0.1, 10, (1,), 1, openings=("I cannot",), refused=9, asked=12),
)


def through_json(report: SafetyReport) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(json.dumps(report.to_json()))
    return raw


def test_a_report_survives_its_file() -> None:
    assert SafetyReport.from_json(through_json(REPORT)) == REPORT


def test_the_file_begins_with_the_keys_that_it_always_had() -> None:
    always = [
        *("job_id", "base_model", "base_digest", "recipe", "resolved", "micro_batch_size", "thresholds", "data_sha256"),
        *("trained_tokens", "steps", "tau", "trigger_rate", "triggered_steps", "validation", "gate", "base", "adapter"),
        *("asr", "harmfulness_score", "over_refusal", "utility", "seconds", "selected", "risky_rows"),
    ]
    assert list(REPORT.to_json())[: len(always)] == always


def test_the_file_holds_plain_json_all_the_way_down() -> None:
    assert through_json(REPORT) == REPORT.to_json()


def test_a_report_of_the_first_version_can_be_read() -> None:
    raw = {
        "recipe": {"seed": 5},
        "resolved": {"n_epochs": 1, "batch_size": 4, "learning_rate_multiplier": 1.0, "learning_rate": 2e-3},
        "base_digest": "sha256:0",
        "tau": {"mean": 1.5},
        "trigger_rate": None,
        "selected": {"indices": [3, 1], "relevance": [0.5, 0.25], "gains": [1.0, None], "rank": 1},
        "leaks": {},
        "gate": {"decision": "pass", "reasons": []},
        "base": [],
        "adapter": [{name: getattr(RESULT, name) for name in SuiteResult.__dataclass_fields__ if name != "kappa"}],
    }
    found = SafetyReport.from_json(raw)
    assert found.adapter == (RESULT,)
    assert found.selected == SelectedRows((3, 1), (0.5, 0.25), (1.0, None), 1)
    assert (found.job_id, found.risky_rows, found.asr) == (None, None, AttackSuccess())


def test_what_was_not_measured_is_not_passed() -> None:
    found = SafetyReport.from_json({"base": []})
    assert (found.gate.decision, found.selected, found.asr) == ("inconclusive", None, AttackSuccess())


def test_a_report_is_read_without_torch() -> None:
    code = "import sys, spard.release.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_report_that_does_not_say_it_is_of_the_first_audit() -> None:
    raw = through_json(replace(REPORT, audit_version=7, replies={"base": 3, "adapter": 4}))
    assert (SafetyReport.from_json(raw).audit_version, SafetyReport.from_json(raw).replies["adapter"]) == (7, 4)
    assert SafetyReport.from_json({key: raw[key] for key in raw if key != "audit_version"}).audit_version == 1
