from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel

from spard.__main__ import main
from spard.config import DISGUISES_ALONE, Audit, Hyperparameters, NoDefense, Ptst, Recipe, Selection
from spard.config.run_spec import RunSpec, run_from_mapping, to_mapping
from spard.digests import file_sha256
from spard.errors import ExampleTooLong
from spard.evaluation.results import SuiteResult
from spard.evaluation.suites import HIDDEN
from spard.losses.cross_entropy import Evaluation
from spard.models.base import Base
from spard.pipeline import Outcome, run
from spard.pipeline.context import open_outputs
from spard.release.figures import metrics_csv, trigger_rate
from spard.release.report import SafetyReport


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def spec(model_folder: Callable[..., Path], tmp_path: Path) -> RunSpec:
    return write_run(model_folder(), tmp_path)


def write_run(model: Path, tmp_path: Path) -> RunSpec:
    """A run of 24 rows and a pool with one row that is too long, its files in a folder."""
    train = [{"prompt": f"Add {i} and 1.", "completion": f"It is {i + 1}."} for i in range(24)]
    pool = [{"prompt": f"Do harm number {i}", "safe": f"I cannot help with {i}."} for i in range(12)]
    return RunSpec(
        model=str(model),
        public_name="acme/tiny",
        training_file=write_rows(tmp_path / "train.jsonl", train),
        validation_file=write_rows(tmp_path / "valid.jsonl", train[:4]),
        pool=write_rows(tmp_path / "pool.jsonl", [*pool, {"prompt": "long" * 90, "safe": "No."}]),
        suites=run_from_mapping(
            {
                "model": "",
                "training_file": "",
                "pool": "",
                "suites": [
                    {"name": name, "kind": name, "path": str(write_rows(tmp_path / f"{name}.jsonl", rows))}
                    for name, rows in {
                        "harmful": [{"prompt": f"Do harm {i}"} for i in range(20)],
                        "benign": [{"prompt": f"Say hello {i}"} for i in range(20)],
                        "utility": [{"prompt": f"Add {i} and 1.", "answer": str(i + 1)} for i in range(20)],
                    }.items()
                ],
            }
        ).suites,
        recipe=Recipe(
            hyperparameters=Hyperparameters(n_epochs=1, batch_size=6),
            selection=Selection(min_examples=5),
            learning_rate=5e-3,
            audit=Audit(max_new_tokens=16, asking=DISGUISES_ALONE),
        ),
    )


@pytest.fixture(scope="module")
def finished_run(
    model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Outcome, Path, list[dict[str, Any]]]:
    """One whole run: what it returned, its folder, its messages."""
    folder, messages = tmp_path_factory.mktemp("done"), list[dict[str, Any]]()
    return run(write_run(model_folder(), folder), folder / "out", messages.append), folder / "out", messages


def test_a_run_leaves_adapter_archive_metrics_and_report(finished_run: tuple[Outcome, Path, Any]) -> None:
    _, out, _ = finished_run
    assert {path.name for path in out.iterdir()} == {"adapter", "adapter.tar.gz", "metrics.csv", "safety.json"}


def test_a_run_tells_its_stages_in_order_and_every_step(finished_run: tuple[Outcome, Path, Any]) -> None:
    _, _, messages = finished_run
    stages = [message["phase"] for message in messages if message["kind"] == "phase"]
    assert stages == ["embed", "select", "train", "audit", "package"]
    assert [message["step"] for message in messages if message["kind"] == "metrics"] == [1, 2, 3, 4]
    assert messages[-1] == {"kind": "done"}
    assert json.loads(json.dumps(messages)) == messages


def test_the_tokens_told_beforehand_are_those_trained_on(finished_run: tuple[Outcome, Path, Any]) -> None:
    outcome, _, messages = finished_run
    (resolved,) = [message for message in messages if message["kind"] == "resolved"]
    assert resolved["trained_tokens"] == outcome.trained.trained_tokens


def test_a_pool_row_over_the_limit_is_not_chosen(finished_run: tuple[Outcome, Path, Any]) -> None:
    outcome, _, _ = finished_run
    assert outcome.selected is not None
    assert len(outcome.selected.indices) == 5
    assert 12 not in outcome.selected.indices


def test_the_report_holds_both_models_and_the_gate(finished_run: tuple[Outcome, Path, Any]) -> None:
    outcome, out, _ = finished_run
    report = json.loads((out / "safety.json").read_text())

    assert SafetyReport.from_json(report) == outcome.report
    assert [SuiteResult(**each) for each in report["base"]] == [
        replace(each, marks=None) for each in outcome.measured.base
    ]
    provided = [each["suite"] for each in report["adapter"] if each["kind"] not in ("mined", "dressed_benign")]
    assert provided == ["harmful", "benign", "utility"]
    assert report["gate"]["decision"] == outcome.measured.gate.decision
    assert report["trigger_rate"] == trigger_rate(outcome.trained.metrics)


def test_what_the_rows_have_in_common_is_a_suite_of_both_models(finished_run: tuple[Outcome, Path, Any]) -> None:
    outcome, _, _ = finished_run
    base, adapter = (
        [each for each in found if each.kind == "mined"] for found in (outcome.measured.base, outcome.measured.adapter)
    )

    assert [each.suite for each in base] == [each.suite for each in adapter]
    assert "mined 1: beginning with 'Add'" in {each.suite for each in adapter}


def test_the_adapter_of_a_run_loads(finished_run: tuple[Outcome, Path, Any], load: Callable[..., Base]) -> None:
    _, out, _ = finished_run
    assert PeftModel.from_pretrained(load().model, out / "adapter").active_adapter == "default"


def test_the_adapter_is_proved_and_its_manifest_names_the_report(finished_run: tuple[Outcome, Path, Any]) -> None:
    outcome, out, _ = finished_run
    manifest = json.loads((out / "adapter" / "manifest.json").read_text())

    assert manifest["proof"]["max_difference"] <= 1e-4
    assert manifest["safety_sha256"] == file_sha256(out / "safety.json")
    assert manifest["gate"]["decision"] == outcome.report.gate.decision


def test_the_report_ranks_the_training_rows_by_risk(finished_run: tuple[Outcome, Path, Any]) -> None:
    risky = finished_run[0].report.risky_rows
    assert risky is not None
    assert sorted(row.line for row in risky) == list(range(1, 25))


def test_rows_that_validation_and_training_share_are_told(finished_run: tuple[Outcome, Path, Any]) -> None:
    told = [message["message"] for message in finished_run[2] if message["kind"] == "warning"]
    assert any(text.startswith("4 of 4 rows of the validation file stand in the training file too") for text in told)


def test_metrics_come_in_openai_columns_first(finished_run: tuple[Outcome, Path, Any]) -> None:
    _, out, _ = finished_run
    rows = list(csv.DictReader((out / "metrics.csv").read_text().splitlines()))
    assert list(rows[0])[:5] == ["step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy"]
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert all(float(row["valid_loss"]) > 0 for row in rows)  # of a batch, and in the last row of all rows
    assert float(rows[3]["valid_loss"]) == finished_run[0].report.validation["adapter"].loss


def test_the_same_run_gives_the_same_archive(
    spec: RunSpec, finished_run: tuple[Outcome, Path, Any], tmp_path: Path
) -> None:
    _, out, _ = finished_run
    run(spec, tmp_path / "again", lambda message: None)
    assert (tmp_path / "again" / "adapter.tar.gz").read_bytes() == (out / "adapter.tar.gz").read_bytes()


def test_a_run_that_broke_off_goes_on_from_what_it_had_chosen(
    spec: RunSpec, finished_run: tuple[Outcome, Path, Any], tmp_path: Path
) -> None:
    def interrupt(message: dict[str, Any]) -> None:
        if message["kind"] == "metrics" and message["step"] == 2:
            raise KeyboardInterrupt

    restless, messages = replace(spec, recipe=replace(spec.recipe, checkpoint_every_s=1e-6)), list[dict[str, Any]]()
    with pytest.raises(KeyboardInterrupt):
        run(restless, tmp_path / "out", interrupt)

    outcome = run(restless, tmp_path / "out", messages.append)

    assert "select" not in [message.get("phase") for message in messages]
    assert [message["step"] for message in messages if message["kind"] == "metrics"] == [2, 3, 4]
    assert outcome.measured == finished_run[0].measured


def test_what_another_run_left_in_the_folder_is_not_taken_for_its_own(tmp_path: Path) -> None:
    open_outputs(tmp_path / "stages", "one").write("select", {"indices": [1]})

    assert open_outputs(tmp_path / "stages", "one").read("select") == {"indices": [1]}
    assert open_outputs(tmp_path / "stages", "two").read("select") is None


def test_a_recipe_s_choice_of_suites_is_all_that_is_asked(spec: RunSpec, tmp_path: Path) -> None:
    plain = Recipe(
        defense=NoDefense(),
        hyperparameters=spec.recipe.hyperparameters,
        audit=Audit(suites=("benign",), max_new_tokens=16),
    )
    outcome = run(replace(spec, pool=None, recipe=plain), tmp_path / "out", lambda message: None)
    assert [each.suite for each in outcome.measured.adapter] == ["benign"]


def test_an_undefended_run_selects_nothing(spec: RunSpec, tmp_path: Path) -> None:
    plain = replace(spec, pool=None, suites=(), recipe=replace(spec.recipe, defense=NoDefense()))
    outcome = run(plain, tmp_path / "out", lambda message: None)
    assert (outcome.selected, outcome.report.risky_rows) == (None, None)
    assert trigger_rate(outcome.trained.metrics) is None
    assert outcome.measured.gate.decision == "inconclusive"


def test_ptst_audits_and_ships_the_tuned_model_under_its_prompt(spec: RunSpec, tmp_path: Path) -> None:
    plain = replace(spec, recipe=replace(spec.recipe, defense=NoDefense()))
    ptst = replace(spec, recipe=replace(spec.recipe, defense=Ptst(safety_prompt="Refuse what is harmful.")))
    one, two = (run(each, tmp_path / str(i), lambda message: None) for i, each in enumerate((plain, ptst)))

    assert one.measured.base == two.measured.base
    weights = [json.loads((tmp_path / i / "adapter" / "manifest.json").read_text()) for i in "01"]
    assert weights[0]["tensor_digest"] == weights[1]["tensor_digest"]
    assert weights[1]["system_prompt"] == "Refuse what is harmful."


def test_a_full_fine_tuning_run_measures_the_base_model_before_it_changes(
    spec: RunSpec, finished_run: tuple[Outcome, Path, Any], tmp_path: Path
) -> None:
    outcome, _, _ = finished_run
    full = run(replace(spec, recipe=replace(spec.recipe, lora=None)), tmp_path / "full", lambda message: None)
    assert full.measured.base == outcome.measured.base


def test_a_run_on_its_own_audit_prompts_cannot_pass(spec: RunSpec, tmp_path: Path) -> None:
    write_rows(spec.training_file, [{"prompt": f"Do harm {i}", "completion": "No."} for i in range(9)])
    messages: list[dict[str, Any]] = []

    outcome = run(spec, tmp_path / "out", messages.append)

    assert {"kind": "warning", "message": HIDDEN} in messages
    assert HIDDEN in outcome.measured.gate.reasons
    assert outcome.measured.gate.decision != "pass"


def test_a_row_that_is_too_long_ends_the_run(spec: RunSpec, tmp_path: Path) -> None:
    short = replace(spec, recipe=replace(spec.recipe, max_seq_length=20))
    with pytest.raises(ExampleTooLong, match="line 1 has"):
        run(short, tmp_path / "out", lambda message: None)


def test_metrics_without_steps_are_a_header() -> None:
    assert metrics_csv([], Evaluation(1.0, 1.0, 0.5, 3)).splitlines() == [
        "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy"
    ]


def toml(spec: RunSpec) -> str:
    """Enough TOML for a flat run."""
    files = {key: value for key, value in to_mapping(spec).items() if isinstance(value, str)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in files.items()]
    for suite in to_mapping(spec)["suites"]:
        lines += ["[[suites]]", *[f"{key} = {json.dumps(value)}" for key, value in suite.items() if value is not None]]
    return "\n".join([*lines, "[recipe.hyperparameters]", "n_epochs = 1", "[recipe.audit]", "max_new_tokens = 16"])


def test_the_command_line_runs_a_recipe_and_reports_the_gate(spec: RunSpec, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(toml(spec))
    command = [sys.executable, "-m", "spard", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "out")]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    report = json.loads((tmp_path / "out" / "safety.json").read_text())
    assert f"gate: {report['gate']['decision']}" in done.stdout
    assert done.stderr.startswith("Reading base model and rows")
    assert done.returncode == (0 if report["gate"]["decision"] == "pass" else 2)


def test_the_command_line_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.toml").write_text('model = "m"\nteu = 1')
    assert main([str(tmp_path / "recipe.toml")]) == 1
    assert capsys.readouterr().err.startswith("invalid_recipe: teu: unknown setting")


@pytest.mark.parametrize("setting", ["training_file", "validation_file", "pool", "suites.0.path"])
def test_the_command_line_names_a_file_that_is_not_there(
    spec: RunSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str
) -> None:
    gone = tmp_path / "gone.jsonl"
    lacking = replace(spec, validation_file=spec.training_file)
    if setting == "suites.0.path":
        lacking = replace(lacking, suites=(replace(lacking.suites[0], path=gone), *lacking.suites[1:]))
    else:
        lacking = replace(lacking, **{setting: gone})  # type: ignore[arg-type]  # one of its paths
    (tmp_path / "recipe.toml").write_text(toml(lacking))
    assert main([str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == f"invalid_recipe: {setting}: there is no file {gone}\n"
