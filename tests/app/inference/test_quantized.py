"""A model answers as it was trained and audited: in NF4 where its job, or the provider, held it so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from peft import PeftModel
from pydantic import SecretStr

from app import db
from app.db.tables import BaseModelEntry
from app.inference.released import find_released
from app.keys import Principal
from app.settings import Settings
from spard.config.quantization import OFFERED, Quantization, Quantizes
from spard.models.base import load_base
from spard.models.generate import generate
from tests.app.inference.conftest import RECIPE, serve_lab
from tests.spard.parts import write_model

QUESTIONS = ["What is two and two?", "Hello there", "Say something"]
TOKENS = 30


def greedy_replies(model: Path, quantization: Quantization, adapter: Path | None = None) -> list[str]:
    """What the audit's generation says greedily."""
    base = load_base(model, device="cpu", quantization=quantization)
    tuned = PeftModel.from_pretrained(base.model, adapter).eval() if adapter else base.model
    return generate(tuned, base.tokenizer, QUESTIONS, TOKENS)


def test_a_released_adapter_answers_on_nf4_and_the_plain_base_model_beside_it_does_not(tmp_path: Path) -> None:
    """One source, held twice: an engine of its own for each, and greedy text as the audit of each hears it."""
    model = write_model(tmp_path / "model", hidden_size=64, intermediate_size=128, head_dim=16)
    with serve_lab(tmp_path / "lab", model) as lab:
        lab.recipe = replace(RECIPE, quantization=OFFERED)
        name, client = lab.release(1), lab.client()
        (adapter,) = (each for each in lab.home.glob("ftjob-*") if each.is_dir())

        def answers(asked: str) -> list[str]:
            whole = [
                client.chat.completions.create(
                    model=asked, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=TOKENS
                )
                for question in QUESTIONS
            ]
            return [(each.choices[0].message.content or "").strip() for each in whole]

        found = {asked: answers(asked) for asked in (name, "tiny")}
        assert len(lab.app.state.serving.engines.pids()) == 2
    assert found[name] == greedy_replies(model, OFFERED, adapter)
    assert found["tiny"] == greedy_replies(model, "none")
    assert found["tiny"] != greedy_replies(model, OFFERED)  # or the test could not tell them apart


@pytest.mark.parametrize(("offered", "held"), [("never", "none"), ("if_needed", "none"), ("always", OFFERED)])
def test_a_base_model_is_held_as_it_is_offered(
    offered: Quantizes, held: Quantization, sqlite_url: str, tmp_path: Path
) -> None:
    settings = Settings(data_dir=tmp_path, database_url=SecretStr(sqlite_url))
    engine = db.make_engine(sqlite_url)
    with db.transaction(engine) as session:
        session.add(BaseModelEntry(alias="big", source="/models/big", quantization=offered))
    with db.read(engine) as session:
        found = find_released(session, Principal("org-customer", "key_1", frozenset()), "big", settings)
    engine.dispose()

    assert found.quantization == held
