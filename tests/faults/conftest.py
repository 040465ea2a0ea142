"""A shop for the faults, and at the end of a run what was injected and which guards fired."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from app.db import transaction
from app.webhooks import service as webhooks
from app.webhooks.service import EndpointCreate
from tests.faults.mailbox import Mailbox, mailbox
from tests.faults.storm import fault_seed
from tests.place import Place
from tests.spard.parts import write_model
from tests.worker.shop import Shop

Record = Callable[[str, object], None]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def box(tmp_path: Path, seed: int) -> Iterator[Mailbox]:
    with mailbox(tmp_path, Random(seed)) as box:
        yield box


@pytest.fixture
def shop(tmp_path: Path, postgres_url: str, local_place: Place, model: Path, box: Mailbox) -> Iterator[Shop]:
    """Its customer wants to be told of every end."""
    shop = Shop(tmp_path / "data", postgres_url, local_place, model)
    shop.work_dir.mkdir(parents=True)
    with transaction(shop.engine) as session:
        webhooks.create(session, shop.key.project_id, EndpointCreate(url=box.url))
    yield shop
    shop.engine.dispose()


@pytest.fixture
def seed(record_property: Record) -> int:
    """Shown at the end of the run; FAULT_SEED sets it."""
    seed = fault_seed()
    record_property("FAULT_SEED", seed)
    return seed


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for reports in terminalreporter.stats.values():
        for report in reports:
            found = getattr(report, "user_properties", [])
            if found and getattr(report, "when", "") == "call" and "faults" in report.nodeid:
                shown = ", ".join(f"{name} {value}" for name, value in found)
                terminalreporter.write_line(f"{report.nodeid.split('::')[-1]}: {shown}")
