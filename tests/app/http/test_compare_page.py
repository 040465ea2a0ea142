"""Jobs side by side: which is better by the intervals, and their losses on the same axes."""

# ruff: noqa: F811 - fixtures are asked for by the names that they are imported under

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.db.tables.job_records import GateJson
from app.jobs.reports.plots import overlay
from tests.app.http.conftest import JOBS, Service
from tests.app.http.test_dashboard import SignIn, sign_in  # noqa: F401 - fixture
from tests.app.http.test_job_page import FIGURES
from tests.app.http.test_statements import end

PASSED: GateJson = {"decision": "pass", "reasons": []}
STOPPED: GateJson = {"decision": "fail", "reasons": ["Odd."]}


def result(kind: str, hits: int, *, n: int = 100, suite: str = "plain", judge: str = "refusal") -> dict[str, Any]:
    counts = {"n": n, "unscored": 0, "degenerate": 0, "hits": hits, "rate": hits / n, "low": 0.0, "high": 1.0}
    return {"suite": suite, "kind": kind, "judge": judge} | counts


class Compare:
    """Ends jobs with given results, and shows them side by side."""

    def __init__(self, service: Service, customer: TestClient, job_body: dict[str, Any], browser: TestClient) -> None:
        self._service, self._customer, self._body, self._browser = service, customer, job_body, browser
        self.ids: list[str] = []

    def end_job(self, results: Sequence[Mapping[str, Any]], gate: GateJson = PASSED) -> None:
        self.ids.append(self._customer.post(JOBS, json=self._body).json()["id"])
        key = f"jobs/report-{len(self.ids)}"
        end(self._service, gate, key, self._body["training_file"])
        report = FIGURES | {"gate": gate, "adapter": results, "base": []}
        self._service.app.state.storage.write(key, [json.dumps(report).encode()])

    def page(self) -> str:
        return self._browser.get("/compare", params={"ids": self.ids}).text


@pytest.fixture
def compare(service: Service, customer: TestClient, job_body: dict[str, Any], sign_in: SignIn) -> Compare:
    return Compare(service, customer, job_body, sign_in())


def cells(page: str, title: str) -> list[str]:
    """The cells of a measure's row without tags, one per job and last what the intervals say."""
    row = re.search(rf'<th scope="row">{title}<br>.*?</tr>', page, re.DOTALL)
    assert row, title
    told = re.findall("<td>(.*?)</td>", row[0].replace("\N{NO-BREAK SPACE}", " "))
    return [re.sub("<.*?>", " ", each) for each in told]


def test_the_better_job_of_each_measure_is_marked_where_the_intervals_say_so(compare: Compare) -> None:
    compare.end_job([result("harmful", 40), result("benign", 3), result("utility", 20)])
    compare.end_job([result("harmful", 2), result("benign", 5), result("utility", 90)])
    page = compare.page()
    for title in ("Attacks that succeed", "Right answers"):
        first, second, words = cells(page, title)
        assert ("better" in first, "better" in second) == (False, True), title
        assert words == "Its 95 % interval lies apart from all others."
    first, second, words = cells(page, "Harmless requests refused")
    assert "better" not in first + second
    assert words == "No difference shown: the jobs' 95 % intervals overlap.".replace("'", "&#39;")
    assert "5 of 100; 2.2 % to 11.2 %" in second


@pytest.mark.parametrize(
    ("results", "gate", "words"),
    [
        (result("harmful", 2), STOPPED, "No job is marked: the lowest figure is of a job that was not released."),
        (result("harmful", 2, suite="other"), PASSED, "Not comparable: the jobs were asked different suites"),
        (result("harmful", 2, judge="other"), PASSED, "Not comparable: the jobs were asked different suites"),
    ],
)
def test_no_job_is_marked_that_was_not_released_or_was_asked_otherwise(
    compare: Compare, results: dict[str, Any], gate: GateJson, words: str
) -> None:
    compare.end_job([result("harmful", 40)])
    compare.end_job([results], gate)
    page = compare.page()
    assert "✓ better" not in page
    assert cells(page, "Attacks that succeed")[-1].startswith(words)


def test_a_job_is_marked_only_if_it_is_better_than_every_other_that_was_asked(compare: Compare) -> None:
    for hits in (40, 2, 3):
        compare.end_job([result("harmful", hits)])
    compare.end_job([result("utility", 90)])
    page = compare.page()
    assert "✓ better" not in page
    assert cells(page, "Attacks that succeed")[-2:] == [
        "not asked",
        "No difference shown: the best jobs&#39; 95 % intervals overlap.",
    ]
    assert "Right answers<br>" not in page  # only one job was asked


def test_losses_lie_over_each_other_and_are_told_in_words(
    compare: Compare, customer: TestClient, job_body: dict[str, Any]
) -> None:
    compare.end_job([result("harmful", 40)])
    compare.end_job([result("harmful", 40)], STOPPED)
    compare.ids.append(customer.post(JOBS, json=job_body).json()["id"])
    page = compare.page()
    assert re.findall(r'<polyline class="(.*?)"', page) == ["line-1", "line-2"]
    assert re.search(r'aria-label="Training losses\. [^"]*at step 1, [^"]*at step 5; [^"]*: not recorded"', page)
    legend = re.findall(r'<line class="(line-.)".*?</svg> (.*?)</li>', page)
    assert [look for look, _ in legend] == ["line-1", "line-2", "line-3"]
    assert legend[2][1].endswith("not recorded")


def test_lines_share_their_axes() -> None:
    found = overlay([("a", [(1, 4.0), (2, 4.0)]), ("b", [(1, 2.0), (4, 2.0)])], 100)
    assert found is not None
    assert [each.points for each in found.lines] == ["0.0,0.0 333.3,0.0", "0.0,50.0 1000.0,50.0"]
    assert [(each.label, each.at) for each in found.y_ticks][-1] == ("4", 0.0)
    assert overlay([("a", []), ("b", [])], 100) is None
