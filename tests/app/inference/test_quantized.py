"""A base model answers as its jobs train on it: in NF4 where the provider offers it so."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from app import db
from app.db.tables import BaseModelEntry
from app.inference.released import released
from app.keys.service import Principal
from app.settings import Settings
from spard.config.quantization import OFFERED, Quantization, Quantizes


@pytest.mark.parametrize(("offered", "held"), [("never", "none"), ("if_needed", "none"), ("always", OFFERED)])
def test_a_base_model_is_held_as_it_is_offered(
    offered: Quantizes, held: Quantization, sqlite_url: str, tmp_path: Path
) -> None:
    settings = Settings(data_dir=tmp_path, database_url=SecretStr(sqlite_url))
    engine = db.make_engine(sqlite_url)
    with db.transaction(engine) as session:
        session.add(BaseModelEntry(alias="big", source="/models/big", quantization=offered))
    with db.read(engine) as session:
        found = released(session, Principal("org-customer", "key_1", frozenset()), "big", settings)
    engine.dispose()

    assert found.quantization == held
