"""Other people's clients, unmodified, against a live service: all of their checks that need no training.

The first of the matrix runs always; SPARD_SOAK=1 adds the others, which `make clients` runs with training.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.app.conformance.conftest import finish_a_job
from tests.app.http.conftest import Service, rows
from tests.clients import report
from tests.clients.matrix import CLIENTS, Client
from tests.clients.running import run

_IS_SOAK = os.environ.get("SPARD_SOAK") == "1"
_ASKED = CLIENTS if _IS_SOAK else CLIENTS[:1]


@dataclass(frozen=True)
class Counter:
    """Where these customers stand: a service without a worker."""

    url: str
    key: str
    admin_key: str
    folder: Path
    job: str


@pytest.mark.parametrize("client", _ASKED, ids=lambda client: client.key)
def test_a_client_finds_what_it_expects(
    client: Client, live: tuple[Service, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, url = live
    service.app.state.settings = service.app.state.settings.model_copy(update={"bad_files": "fail"})
    monkeypatch.setenv("CLIENT_MODEL", "lab/tiny-1")
    for name, content in {"train": rows(40), "validation": rows(12), "bad": b'{"messages": []}\n' * 20}.items():
        (tmp_path / f"{name}.jsonl").write_bytes(content)
    keys = [service.add_key("org-customer", *scopes) for scopes in (["customer"], ["admin", "customer"])]
    found = run(client, Counter(url, keys[0], keys[1], tmp_path, finish_a_job(service)))
    if _IS_SOAK:
        report.keep(report.FIGURES, found, with_training=False, with_inference=False)
    if found.not_run:
        pytest.skip(found.not_run)
    assert found.faults == {}
    assert found.passed_checks
