"""What the API finds out about a base model without torch, before customers can name it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from spard.digests import folder_digest
from tests.app.http.conftest import NO_WEIGHTS
from tests.spard.parts import byte_tokenizer

MODELS, POLICIES = "/v1/admin/models", "/v1/admin/policies"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    byte_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(NO_WEIGHTS)
    return folder


def offer_folder(provider: TestClient, model: Path) -> tuple[int, Any]:
    answer = provider.post(MODELS, json={"alias": "tiny", "source": str(model)})
    return answer.status_code, answer.json()


def without_end_token(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in settings.items() if name != "eos_token"}))


def unknown_end_token(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<|another|>"}))


def bad_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('not today') }}")


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def truncate_weights(folder: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(15))


def missing_shard(folder: Path) -> None:
    index = {"weight_map": {"w": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


FAULTS: dict[Callable[[Path], None], str] = {
    without_end_token: "no end token",
    unknown_end_token: "no end token",
    bad_template: "not today",
    broken_tokenizer: "tokenizer cannot be read",
    truncate_weights: "model.safetensors is not whole",
    missing_shard: "model-00001-of-00002.safetensors is missing",
}


@pytest.mark.parametrize("spoil", FAULTS, ids=lambda spoil: spoil.__name__)
def test_what_would_fail_every_job_is_not_offered(
    spoil: Callable[[Path], None], provider: TestClient, model: Path
) -> None:
    assert offer_folder(provider, model)[0] == 200
    spoil(model)
    status, answer = offer_folder(provider, model)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "invalid_model", "source")
    assert FAULTS[spoil] in answer["error"]["message"]


def test_the_provider_is_told_that_no_audit_can_decide(provider: TestClient, model: Path) -> None:
    (warning,) = offer_folder(provider, model)[1]["warnings"]
    assert "SPARD_JUDGE_ERRORS" in warning
    thresholds = {"allow_unmeasured_judge": True}
    assert provider.post(POLICIES, json={"thresholds": thresholds}).status_code == 200
    assert offer_folder(provider, model)[1]["warnings"] == []


def test_a_model_that_brings_its_judge_s_measure_needs_no_warning(provider: TestClient, model: Path) -> None:
    (model / "calibration").mkdir()
    for name, digest, is_known in (("judge", "sha256:0", False), ("judge-refusal", folder_digest(model), True)):
        record = {"judge": "refusal", "base_digest": digest}
        (model / "calibration" / f"{name}.json").write_text(json.dumps(record))
        assert (offer_folder(provider, model)[1]["warnings"] == []) == is_known
