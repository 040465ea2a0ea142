"""A job in its child: its stages, what it tells, and what it does not do twice."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from app.files.tokenizer import read_tokenizer
from app.settings import Settings
from spard.config import Audit
from spard.data.chat import get_renderer
from spard.errors import ExampleTooLong, InvalidData, Stopped
from tests.app.http.test_template_arguments import EFFORT
from tests.worker.heard import Heard, Work, read_report, unpack_archive
from tests.worker.parts import PLAIN, RECIPE, job_folder
from worker.failures import Fault, GpuMissing, failure
from worker.process import environment
from worker.workdir import Folder, read_assignment, write_assignment


def test_the_phases_come_in_order(finished_job: tuple[Folder, Heard]) -> None:
    phases = [message["phase"] for message in finished_job[1].of_kind("phase")]
    assert phases == ["embed", "select", "train", "audit", "package"]


def test_every_step_is_reported(finished_job: tuple[Folder, Heard]) -> None:
    steps = [(message["step"], message["total_steps"]) for message in finished_job[1].of_kind("metrics")]
    assert steps == [(i, 6) for i in range(1, 7)]


def test_the_embeddings_that_it_made_are_told(finished_job: tuple[Folder, Heard]) -> None:
    told = {message["entry"]: message["made"] for message in finished_job[1].of_kind("cached")}
    cache = finished_job[0].root.parent / "cache"
    made = {path.relative_to(cache).as_posix() for path in cache.glob("embedding*/*")}
    assert {entry for entry in told if entry.startswith("embedding")} == made
    assert all(told[entry] for entry in made)


def test_the_numbers_that_stand_for_auto_are_told_before_training(finished_job: tuple[Folder, Heard]) -> None:
    kinds = [message["kind"] for message in finished_job[1].messages]
    assert kinds.index("resolved") < kinds.index("metrics")
    assert finished_job[1].of_kind("resolved")[0]["data"]["learning_rate_multiplier"] == 1.0


def test_the_audit_is_told_as_moderation_checks(finished_job: tuple[Folder, Heard]) -> None:
    told = [message for message in finished_job[1].of_kind("event") if message["type"] == "moderation_checks"]
    assert [message["data"]["asr"] for message in told] == [read_report(finished_job[0])["asr"]]


def test_plain_fine_tuning_selects_nothing(work: Work, message_pipe: Heard, tmp_path: Path, model: Path) -> None:
    work(job_folder(tmp_path / "job", model, recipe=PLAIN, pool=None))
    assert [message["phase"] for message in message_pipe.of_kind("phase")] == ["train", "audit", "package"]


def test_a_choice_made_before_is_kept(
    finished_job: tuple[Folder, Heard], work: Work, message_pipe: Heard, tmp_path: Path, model: Path
) -> None:
    folder = job_folder(tmp_path / "job", model)
    (folder.stage / "select.json").write_text(json.dumps({"indices": [3, 1]}))
    work(folder)
    assert [message["phase"] for message in message_pipe.of_kind("phase")] == ["train", "audit", "package"]
    assert json.loads((folder.stage / "select.json").read_text())["indices"] == [3, 1]


def test_a_job_that_was_stopped_ends_as_if_it_was_not(
    finished_job: tuple[Folder, Heard], work: Work, message_pipe: Heard, tmp_path: Path, model: Path
) -> None:
    folder = job_folder(tmp_path / "job", model)
    with pytest.raises(Stopped):
        work(folder, lambda: len(message_pipe.of_kind("metrics")) >= 3)
    work(folder)
    assert [message["step"] for message in message_pipe.of_kind("metrics")] == [1, 2, 3, 4, 5, 6]
    assert unpack_archive(folder, tmp_path / "a").joinpath("adapter_model.safetensors").read_bytes() == (
        unpack_archive(finished_job[0], tmp_path / "b").joinpath("adapter_model.safetensors").read_bytes()
    )


def test_figures_of_other_weights_are_measured_again(
    finished_job: tuple[Folder, Heard], work: Work, tmp_path: Path, model: Path
) -> None:
    folder = job_folder(tmp_path / "job", model)
    results = [result | {"hits": 0} for result in read_report(finished_job[0])["adapter"]]
    (folder.stage / "audit.json").write_text(json.dumps({"weights": "sha256:other", "results": results}))
    work(folder)
    assert read_report(folder)["adapter"] == read_report(finished_job[0])["adapter"]


def test_a_job_for_a_gpu_is_not_done_on_a_cpu(
    work: Work, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch sees no GPU where it was built for none, or for a newer driver; a worker takes no job until it does."""
    for name, value in environment(Settings(device="cuda")).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(GpuMissing) as found:
        work(job_folder(tmp_path / "job", model, recipe=PLAIN))
    assert (failure(found.value).code, failure(found.value).fault) == ("gpu_error", Fault.worker)


def test_a_row_that_is_too_long_fails_before_anything_expensive(
    work: Work, message_pipe: Heard, tmp_path: Path, model: Path
) -> None:
    with pytest.raises(ExampleTooLong):
        work(job_folder(tmp_path / "job", model, recipe=replace(RECIPE, max_seq_length=20)))
    assert {each["kind"] for each in message_pipe.messages} <= {"activity"}  # reading and tokenizing, no stage


def test_a_bad_validation_row_is_blamed_on_its_file(work: Work, tmp_path: Path, model: Path) -> None:
    folder = job_folder(tmp_path / "job", model)
    (folder.root / "in" / "validation.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(InvalidData) as error:
        work(folder)
    assert error.value.param == "validation_file"


def test_the_base_model_is_measured_once_for_all_jobs(finished_job: tuple[Folder, Heard]) -> None:
    kept, base = kept_suites(finished_job[0].root.parent / "cache"), read_report(finished_job[0])["base"]
    assert max(kept.values()) == 1
    assert asked_suites(base) <= kept.keys() <= {each["suite"] for each in base}


def kept_suites(cache: Path) -> Counter[str]:
    """Count the kept figures of a base model by suite."""
    entries = [json.loads(path.read_text()) for path in (cache / "audits").glob("*.json")]
    return Counter(json.loads(each["content"])[0]["suite"] for each in entries)


def asked_suites(base: list[dict[str, Any]]) -> set[str]:
    """Return the suites that a base model was asked: those that can change the decision."""
    return {each["suite"] for each in base if each["n"] + each["unscored"]}


def test_other_audit_settings_are_not_mixed_up(
    finished_job: tuple[Folder, Heard], work: Work, tmp_path: Path, model: Path
) -> None:
    folder = job_folder(tmp_path / "job", model, recipe=replace(RECIPE, audit=Audit(max_prompts=20, max_new_tokens=2)))
    work(folder)
    work(other := job_folder(tmp_path / "again", model))
    first, second = (asked_suites(read_report(each)["base"]) for each in (folder, other))
    kept = kept_suites(tmp_path / "cache")
    assert max(kept.values()) == 2
    assert {name for name, count in kept.items() if count == 2} >= first & second


def test_arguments_that_the_record_of_the_base_model_fixes_are_in_the_rows_and_the_archive(
    work: Work, message_pipe: Heard, tmp_path: Path, model: Path
) -> None:
    base = shutil.copytree(model, tmp_path / "base")
    (base / "chat_template.jinja").write_text(EFFORT)
    tokenizer = read_tokenizer(base, {"effort": "low"})
    folder = job_folder(tmp_path / "job", base, recipe=PLAIN, pool=None)
    record = get_renderer(tokenizer).rendering
    write_assignment(folder, replace(read_assignment(folder), rendering=record.as_json()))
    work(folder)
    adapter = unpack_archive(folder, tmp_path / "unpacked")
    rendering = json.loads((adapter / "manifest.json").read_text())["rendering"]
    assert (rendering["arguments"], rendering["digest"]) == ({"effort": "low"}, record.digest)
    question = [{"role": "user", "content": "Hello"}]
    loaded: Any = AutoTokenizer.from_pretrained(adapter)
    said = loaded.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert said.startswith("<|system|>effort low\n")
