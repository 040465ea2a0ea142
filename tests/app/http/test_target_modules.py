"""Target modules are checked where they are given: of a base model when it is offered, of a job when it is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.app.http.conftest import JOBS
from tests.architectures import write_architecture
from tests.spard.parts import write_model

ALIAS = "lab/tiny-1"
MODELS = "/v1/admin/models"


def put_model(provider: TestClient, source: Path, **more: Any) -> dict[str, Any]:
    """Offer a folder in place of the model that jobs name."""
    got = provider.post(MODELS, json={"alias": ALIAS, "source": str(source)} | more)
    assert got.status_code == 200, got.text
    entry: dict[str, Any] = got.json()
    return entry


REFUSED = {
    "a tied head": (["lm_head"], "smollm", "lm_head is tied to the embeddings"),
    "a tied head beside others": (["q_proj", "lm_head"], "smollm", "leave lm_head out"),
    "embeddings": (["embed_tokens"], "llama", "embed_tokens is no linear layer"),
    "an unknown name beside a known one": (["q_proj", "query"], "llama", "the model has no query; it has"),
    "a norm": (["input_layernorm"], "llama", "is no linear layer"),
    "the head alone, whose states the anchor holds": (["lm_head"], "llama", "alone changes no hidden state"),
}


@pytest.mark.parametrize(("targets", "architecture", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_a_job_cannot_adapt_is_refused_with_the_reason(
    targets: list[str],
    architecture: str,
    reason: str,
    provider_with_model: TestClient,
    customer: TestClient,
    job_body: dict[str, Any],
    tmp_path: Path,
) -> None:
    put_model(provider_with_model, write_model(tmp_path / "weights", architecture))
    for path in (JOBS, f"{JOBS}/estimate"):
        got = customer.post(path, json=job_body | {"lora": {"target_modules": targets}})
        error = got.json()["error"]
        assert (got.status_code, error["code"], error["param"]) == (400, "unsupported_module", "lora.target_modules")
        assert reason in error["message"]
    assert customer.get(JOBS).json()["data"] == []


@pytest.mark.parametrize(
    "more",
    [
        {"lora": {"target_modules": ["q_proj", "mlp.down_proj"]}},
        {"lora": {"target_modules": ["q_proj", "lm_head"]}},
    ],
)
def test_what_can_be_adapted_is_taken(
    more: dict[str, Any],
    provider_with_model: TestClient,
    customer: TestClient,
    job_body: dict[str, Any],
    tmp_path: Path,
) -> None:
    put_model(provider_with_model, write_model(tmp_path / "weights"))
    got = customer.post(JOBS, json=job_body | more)
    assert (got.status_code, got.json().get("error")) == (200, None)


def test_where_no_weights_are_at_hand_the_job_finds_out(customer: TestClient, job_body: dict[str, Any]) -> None:
    assert customer.post(JOBS, json=job_body | {"lora": {"target_modules": ["query"]}}).status_code == 200


def test_an_offer_says_what_the_default_reaches(provider_with_model: TestClient, tmp_path: Path) -> None:
    found = put_model(provider_with_model, write_architecture("Qwen3.5", tmp_path / "hybrid"))["lora_reach"]
    assert (found["layers"], found["of_layers"], found["leaves_out_experts"]) == (4, 4, False)
    assert {"q_proj", "in_proj_qkv"} <= set(found["target_modules"])
    assert 0.1 < found["share"] < 0.5
    assert put_model(provider_with_model, write_architecture("Mixtral", tmp_path / "experts"))["lora_reach"][
        "leaves_out_experts"
    ]
    assert provider_with_model.get(MODELS).json()["data"][0]["lora_reach"]["target_modules"][0] == "q_proj"


def test_a_base_model_has_target_modules_of_its_own(
    provider_with_model: TestClient, customer: TestClient, job_body: dict[str, Any], tmp_path: Path
) -> None:
    weights = write_model(tmp_path / "weights")
    entry = put_model(provider_with_model, weights, target_modules=["q_proj", "v_proj"])
    assert entry["target_modules"] == entry["lora_reach"]["target_modules"] == ["q_proj", "v_proj"]
    for lora, own in ((None, ["q_proj", "v_proj"]), ({"rank": 4}, ["q_proj", "v_proj"])):
        job = customer.post(JOBS, json=job_body | ({"lora": lora} if lora else {})).json()
        assert job["lora"]["target_modules"] == own
    job = customer.post(JOBS, json=job_body | {"lora": {"target_modules": ["o_proj"]}}).json()
    assert job["lora"]["target_modules"] == ["o_proj"]

    put_model(provider_with_model, weights)
    assert customer.post(JOBS, json=job_body).json()["lora"]["target_modules"] is None


@pytest.mark.parametrize(
    ("targets", "code"),
    [
        (["query"], "unsupported_module"),
        (["lm_head"], "unsupported_module"),
        ([".*"], "invalid_value"),
        ([], "invalid_type"),
    ],
)
def test_target_modules_of_a_base_model_are_checked(
    targets: list[str], code: str | None, provider_with_model: TestClient, tmp_path: Path
) -> None:
    ask = {"alias": "other", "source": str(write_model(tmp_path / "weights")), "target_modules": targets}
    got = provider_with_model.post(MODELS, json=ask)
    assert got.json().get("error", {}).get("code") == code, got.text
