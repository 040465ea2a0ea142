"""What is written into a base model's folder while it serves answers nobody; the same bytes put back answer again."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError

from app import db
from app.db.tables import BaseModelEntry
from spard.digests import folder_digest
from tests.app.inference.conftest import Lab, serve_lab

ASK: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 4}
WITHIN_S = 60.0


@pytest.fixture
def lab(tmp_path: Path, tiny_model: Path) -> Iterator[Lab]:
    model = Path(shutil.copytree(tiny_model, tmp_path / "tiny"))
    with serve_lab(tmp_path / "home", model) as found:
        with db.transaction(found.app.state.engine) as session:
            session.get_one(BaseModelEntry, "tiny").digest = folder_digest(model)
        yield found


def answer(lab: Lab) -> str:
    """The answer, or the code of its refusal; an engine that has just ended is asked for again."""
    until = time.monotonic() + WITHIN_S
    while True:
        try:
            return lab.client().chat.completions.create(**ASK).choices[0].message.content or ""
        except APIStatusError as error:
            if error.code != "engine_lost" or time.monotonic() > until:
                return f"{error.status_code} {error.code}"
            time.sleep(0.1)


def test_an_engine_never_answers_with_other_bytes_than_were_offered(lab: Lab) -> None:
    path = lab.model / "model.safetensors"
    first, kept = answer(lab), path.read_bytes()
    assert first
    with path.open("r+b") as file:
        file.seek(len(kept) // 2)
        file.write(b"\x07" * 4096)
    assert answer(lab) == "400 base_model_changed"  # by the engine that runs
    assert answer(lab) == "400 base_model_changed"  # by one that is started on these bytes
    with path.open("r+b") as file:
        file.write(kept)
    assert answer(lab) == first


def test_a_model_that_is_offered_again_is_read_again(lab: Lab) -> None:
    """Also where the engine that runs has read the bytes from before, and could not see that they have changed."""
    assert answer(lab)
    settings = lab.model / "generation_config.json"
    settings.write_text(settings.read_text() + "\n")
    with db.transaction(lab.app.state.engine) as session:
        session.get_one(BaseModelEntry, "tiny").digest = folder_digest(lab.model)
    assert not answer(lab).startswith("400")
