"""Judge and gate are set by variables named after the fields of `JudgeSpec` and `GateThresholds`."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from app.commands import doctor
from app.db import upgrade_schema
from app.errors import Unfit
from app.ops import preflight
from app.ops.children import secret_places
from app.settings import Settings, misspelled_variables, read_settings
from app.storage import open_storage
from spard.config import GateThresholds, JudgeSpec


def test_without_variables_the_defaults_are_the_library_s() -> None:
    settings = read_settings()
    assert (settings.judge, settings.gate) == (JudgeSpec(), GateThresholds())


def test_every_field_of_a_judge_has_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = JudgeSpec(
        name="consensus",
        base_url="https://judge.example/v1",
        model="judge-1",
        api_key_env="OTHER_KEY",
        timeout_s=5.5,
        retries=1,
        concurrency=2,
        family="wildguard",
        template="/etc/spard/template.txt",
        canaries=3,
        members=(JudgeSpec(), JudgeSpec(name="classifier", family="llama_guard", model="/models/guard")),
    )
    assert [each.name for each in fields(wanted) if getattr(wanted, each.name) == each.default] == []
    for each in fields(wanted):
        if each.name not in ("name", "members"):
            monkeypatch.setenv(f"SPARD_JUDGE_{each.name.upper()}", str(getattr(wanted, each.name)))
    monkeypatch.setenv("SPARD_JUDGE", wanted.name)
    members = [{"name": "refusal"}, {"name": "classifier", "family": "llama_guard", "model": "/models/guard"}]
    monkeypatch.setenv("SPARD_JUDGE_MEMBERS", json.dumps(members))
    assert read_settings().judge == wanted


def test_every_threshold_has_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [each.name for each in fields(GateThresholds)]
    others = {"allow_unmeasured_judge": True, "correct_judge_errors": True, "confidence": 0.75}
    values: dict[str, Any] = {name: (i + 1) / 16 for i, name in enumerate(names)} | others
    for name, value in values.items():
        monkeypatch.setenv(f"SPARD_GATE_{name.upper()}", str(value))
    assert read_settings().gate == GateThresholds(**values)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("SPARD_GATE_MAX_ASRR", "SPARD_GATE_MAX_ASR"),
        ("SPARD_MAX_UPLAOD_MB", "SPARD_MAX_UPLOAD_MB"),
        ("SPARD_JUDGE_KEY", "SPARD_JUDGE_API_KEY"),
    ],
)
def test_a_misspelled_setting_is_named_with_the_one_that_is_meant(
    wrong: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(data_dir=tmp_path)
    upgrade_schema(settings.database())
    monkeypatch.setenv(wrong, "1")
    preflight.check(settings)
    assert f"{wrong} is no setting and is ignored; {meant} is one" in caplog.text
    (found,) = [each for each in doctor._service(1) if each.name == "settings"]
    assert (found.state, meant in found.cure) == ("problem", True)


@pytest.mark.parametrize(
    "name", ["SPARD_BASE_URL", "SPARD_JUDGE2_API_KEY", "SPARD_SERVING_PORT", "SPARD_SERVING_SERVICE_HOST", "SPARD_NODE"]
)
def test_variables_of_others_are_no_misspelled_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge's own key, variables that Kubernetes sets for services, and those that parents set for children."""
    monkeypatch.setenv(name, "1")
    judge = JudgeSpec(name="consensus", members=(JudgeSpec(api_key_env="SPARD_JUDGE2_API_KEY"), JudgeSpec()))
    assert misspelled_variables(Settings(judge=judge)) == {}


@pytest.mark.parametrize(
    "name",
    ["max_upload_mb", "max_multipart_mb", "max_line_bytes", "max_rows", "min_rows", "download_url_ttl_s"],
)
def test_a_number_below_its_least_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"SPARD_{name.upper()}", "-1")
    with pytest.raises(Unfit, match=f"SPARD_{name.upper()} is '-1': it should be greater than or equal to"):
        read_settings()


@pytest.mark.parametrize("name", ["of one", "no#1", "what?", "100%41", "für;x"])
def test_a_data_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    settings = Settings(data_dir=folder)
    open_storage(settings.storage()).write("a", [b"1"])
    upgrade_schema(settings.database())
    assert os.listdir(tmp_path) == [name]
    assert (folder / "objects" / "a").read_bytes() == b"1"
    assert (folder / "spard.db").is_file()
    assert preflight.schema_state(settings) == "current"


def test_a_storage_whose_url_has_escapes_is_kept_from_children(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data", storage_url=(tmp_path / "all objects").as_uri())
    assert tmp_path / "all objects" in secret_places(settings)


def test_the_judge_s_key_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARD_JUDGE", "llm")
    monkeypatch.setenv("SPARD_JUDGE_API_KEY", "sk-judge-secret")
    settings = read_settings()
    assert settings.judge_key(settings.judge) == "sk-judge-secret"
    assert "sk-judge-secret" not in f"{settings!r}"


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("SPARD_JUDGE", "refusa1", "SPARD_JUDGE is 'refusa1': it should be 'refusal', 'llm', 'classifier'"),
        ("SPARD_JUDGE_FAMILY", "guard", "'harmbench', 'llama_guard', 'qwen3guard' or 'wildguard'"),
        ("SPARD_JUDGE_CANARIES", "17", "SPARD_JUDGE_CANARIES is '17': it should be less than or equal to 16"),
        ("SPARD_JUDGE_MEMBERS", "[{", "SPARD_JUDGE_MEMBERS is no JSON"),
        (
            "SPARD_JUDGE_MEMBERS",
            '[{"name": "magic"}]',
            "SPARD_JUDGE_MEMBERS[0].name: 'magic' is not one of refusal",
        ),
        ("SPARD_JUDGE_MEMBERS", '[{"nam": "llm"}]', "SPARD_JUDGE_MEMBERS[0].nam: unknown setting"),
        ("SPARD_GATE_MAX_ASR", "2", "SPARD_GATE_MAX_ASR is '2': it should be less than or equal to 1"),
        ("SPARD_GPUS_PER_JOB", "0", "SPARD_GPUS_PER_JOB is '0'"),
        ("SPARD_LEASE_S", "-90", "SPARD_LEASE_S is '-90': it should be greater than 0"),
        ("SPARD_HEARTBEAT_S", "nan", "SPARD_HEARTBEAT_S is 'nan': it should be greater than 0"),
        ("SPARD_JUDGE", "", "SPARD_JUDGE is '': it should be 'refusal'"),
    ],
)
def test_a_wrong_value_is_named_with_its_setting(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, told: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(Unfit) as caught:
        read_settings()
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_variable_is_as_if_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARD_S3_ENDPOINT_URL", "http://s3:7070")
    for name in ("SPARD_S3_PUBLIC_ENDPOINT_URL", "SPARD_METRICS_PORT", "SPARD_SIGNING_KEY"):
        monkeypatch.setenv(name, "")
    settings = read_settings()
    assert (settings.metrics_port, settings.signing_key) == (None, None)
    assert settings.download_link_s() is None  # nobody is sent to an address that only the service knows
