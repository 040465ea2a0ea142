"""The board for Grafana draws every metric that there is, and none that there is not; alerts ask for such alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from tests.app.http.conftest import Service
from worker.metrics import WorkerMetrics

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
BOARD, ALERTS = DEPLOY / "grafana" / "spard.json", DEPLOY / "prometheus" / "spard-alerts.yaml"


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(BOARD.read_text())
    return found


def existing(service: Service) -> dict[str, str]:
    """The metrics of the API and of a worker, and their types."""
    service.http.get("/healthz")
    typed = [line.split() for line in service.http.get("/metrics").text.splitlines() if line.startswith("# TYPE")]
    found = {words[2]: words[3] for words in typed}
    for metric in WorkerMetrics().registry.collect():
        found[metric.name + ("_total" if metric.type == "counter" else "")] = metric.type
    return found


def board_series() -> set[str]:
    """The series that the board's queries name."""
    queries = [target["expr"] for panel in board()["panels"] for target in panel.get("targets", ())]
    return {name for query in queries for name in re.findall(r"\bspard_[a-z_]+", query)}


def series(name: str, kind: str) -> set[str]:
    """What can be asked of a metric."""
    endings = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}.get(kind, ("",))
    return {name + ending for ending in endings}


def test_every_metric_is_drawn_and_every_one_drawn_exists(service: Service) -> None:
    there = existing(service)
    assert [name for name, kind in there.items() if not series(name, kind) & board_series()] == []
    assert board_series() - {each for name, kind in there.items() for each in series(name, kind)} == set()


def test_no_panel_lies_on_another() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board()["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells


def test_every_panel_asks_the_source_that_is_chosen() -> None:
    found = board()
    assert [each["name"] for each in found["templating"]["list"]] == ["source"]
    asked = [target["datasource"]["uid"] for panel in found["panels"] for target in panel.get("targets", ())]
    assert set(asked) == {"${source}"}


def test_every_alert_asks_for_metrics_that_exist_and_says_what_to_do(service: Service) -> None:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    alerts = [rule for group in groups for rule in group["rules"]]
    asked = {name for rule in alerts for name in re.findall(r"\bspard_[a-z_]+", rule["expr"])}
    assert asked - {each for name, kind in existing(service).items() for each in series(name, kind)} == set()
    assert "spard_jobs_rescued_total" in asked
    assert all(rule["annotations"].keys() == {"summary", "description"} for rule in alerts)
