"""Real small parts of a worker's tests: a random model, a tenant with jobs, and whole workers as processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spard.parts import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers folder with a random Llama."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny")
