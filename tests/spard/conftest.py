"""Random models on disk and in memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from spard_lab.lab.make import make
from spard_lab.lab.natural.base import folder_name, make_natural

from spard.models.base import Base, load_base
from tests.clean_processes import pooled_clean_processes
from tests.run_folders import run_folder
from tests.spard.parts import ANY_BASE, TINY_NATURAL, TINY_PLAN, write_model


@pytest.fixture(scope="session", autouse=True)
def clean_processes() -> Iterator[None]:
    """One clean process for all runs in this process."""
    with pooled_clean_processes():
        yield


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of random models by architecture, written once."""
    root = tmp_path_factory.mktemp("models")

    def folder(architecture: str = "llama") -> Path:
        path = root / architecture
        return path if path.exists() else write_model(path, architecture)

    return folder


@pytest.fixture
def load(model_folder: Callable[[str], Path]) -> Callable[..., Base]:
    """A fresh copy of a random model: training changes it in place."""

    def fresh(architecture: str = "llama", dtype: torch.dtype | None = None) -> Base:
        return load_base(model_folder(architecture), device="cpu", dtype=dtype)

    return fresh


@pytest.fixture
def base(load: Callable[..., Base]) -> Base:
    return load()


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lab whose base model was hardly trained; this process's own copy, for some tests change it and mend it."""
    source = run_folder(request, "lab", lambda folder: make(folder, 1, TINY_PLAN, ANY_BASE))
    folder = tmp_path_factory.mktemp("labs") / "lab"
    shutil.copytree(source, folder)
    return folder


@pytest.fixture(scope="session")
def natural(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lab of natural English of the smallest size, as seed 1 of an arena or a bench in its parent folder."""
    labs = tmp_path_factory.mktemp("natural")
    folder = labs / folder_name(TINY_NATURAL, 1)
    make_natural(folder, 1, TINY_NATURAL, labs / "models")
    return folder
