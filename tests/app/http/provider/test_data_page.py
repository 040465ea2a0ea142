"""The provider's pools and suites: a file is looked at before it is imported, and nothing of a look is kept."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.app.http.conftest import Service, jsonl, pool
from tests.app.http.provider.conftest import fault, send

PAGE = "/provider/data"
PART = {"hx-request": "true"}


def rows(n: int = 30) -> list[dict[str, Any]]:
    words = [
        "river",
        "stone",
        "cloud",
        "lamp",
        "garden",
        "tower",
        "bread",
        "engine",
        "mirror",
        "silver",
        "window",
        "forest",
    ]
    return [{"prompt": f"Tell of the {words[i % 12]} {words[i // 12]} {i}", "safe": "I will not."} for i in range(n)]


def preview(provider: TestClient, content: bytes, path: str = "pools/preview?name=general") -> Any:
    return provider.post(f"/v1/admin/{path}", files={"file": ("pool.jsonl", content)})


def test_a_preview_tells_what_an_import_would_make(provider: TestClient) -> None:
    alike = {"prompt": "Tell of the RIVER river 0!", "safe": "No."}
    extra = [alike, {"prompt": "\u0416\u0435\u043b\u0442\u044b\u0439 " * 5, "benign": True}]
    found = preview(provider, jsonl(*rows(), *extra)).json()
    assert (found["rows"], found["errors"], found["replaces"]) == (32, 0, None)
    profile = found["profile"]
    assert (profile["benign_rows"], profile["near_duplicates"], profile["groups"]) == (1, 1, [[1, 31]])
    assert profile["scripts"] == {"Latin": 31, "Cyrillic": 1}
    assert profile["prompt_words"] == {"median": 6, "p95": 6, "longest": 6}
    made = provider.post("/v1/admin/pools?name=general", files={"file": ("p.jsonl", jsonl(*rows(), *extra))}).json()
    assert found["held_out"] == made["held_out"]


def test_nothing_of_a_preview_is_kept(service: Service, provider: TestClient) -> None:
    before = {each.key for each in service.app.state.storage.list()}
    preview(provider, jsonl(*rows()))
    assert provider.get("/v1/admin/pools").json()["data"] == []
    assert {each.key for each in service.app.state.storage.list()} == before


def test_problems_are_told_by_line(provider: TestClient) -> None:
    found = preview(provider, jsonl(*rows(3)) + b'{"prompt": "x"}\nno json\n').json()
    assert (found["errors"], found["profile"], [each["line"] for each in found["problems"]]) == (2, None, [4, 5])


def test_leaks_are_told_both_ways(provider: TestClient) -> None:
    prompts = jsonl(*({"prompt": row["prompt"]} for row in rows(5)))
    suite = {"file": ("s.jsonl", prompts)}
    assert provider.post("/v1/admin/pools?name=general", files={"file": ("p.jsonl", jsonl(*rows()))}).status_code == 200
    asked = preview(provider, prompts, "suites/preview?name=attacks&kind=harmful").json()
    assert asked["leaks"][0]["name"] == "general"
    provider.post("/v1/admin/suites?name=attacks&kind=harmful", files=suite)
    again = preview(provider, jsonl(*rows())).json()
    assert (again["leaks"], again["replaces"]) == ([{"name": "attacks", "prompts": 5}], 1)


def test_a_kept_version_has_a_profile(provider: TestClient, customer: TestClient) -> None:
    made = provider.post("/v1/admin/pools?name=general", files={"file": ("p.jsonl", pool())}).json()
    path = f"/v1/admin/pools/{made['id']}/profile"
    assert provider.get(path).json()["rows"] == made["rows"]
    assert provider.get(path.replace("pools", "suites")).json()["error"]["code"] == "suite_not_found"
    assert customer.get(path).status_code == 403


def test_from_a_file_over_its_preview_to_a_version_and_its_end(browser: TestClient, provider: TestClient) -> None:
    fields, file = {"name": "general", "kind": "pool"}, {"file": ("pool.jsonl", jsonl(*rows()))}
    part = send(browser, f"{PAGE}/preview", fields, of=PAGE, files=file, headers=PART)
    assert part.text.strip().startswith("<h3>30 rows, ready to be imported</h3>")
    whole = send(browser, f"{PAGE}/preview", fields, of=PAGE, files=file)
    assert "30 rows, ready to be imported" in whole.text
    assert 'value="general"' in whole.text
    page = send(browser, PAGE, fields, files=file)
    assert "Imported: general, version 1" in page.text
    (made,) = provider.get("/v1/admin/pools").json()["data"]
    assert "Near duplicates" in browser.get(f"{PAGE}/{made['id']}").text
    page = send(browser, f"{PAGE}/pool/{made['id']}/delete", {}, of=PAGE)
    assert (page.url.path, provider.get("/v1/admin/pools").json()["data"]) == (PAGE, [])
    actions = [each["action"] for each in provider.get("/v1/admin/audit_log").json()["data"]]
    assert actions[:2] == ["pool.deleted", "pool.imported"]


@pytest.mark.parametrize(
    ("fields", "content", "name", "said"),
    [
        ({"name": "-x"}, jsonl(*rows()), "name", "a letter or digit, then"),
        ({"kind": "other"}, jsonl(*rows()), "kind", "harmful"),
        ({}, b'{"prompt": 1}\n', "file", "line 1"),
        ({"name": "x-heldout", "kind": "harmful"}, jsonl(*rows()), "name", "held out"),
    ],
)
def test_a_fault_stands_at_its_field(
    browser: TestClient, provider: TestClient, fields: dict[str, str], content: bytes, name: str, said: str
) -> None:
    asked = {"name": "general", "kind": "pool"} | fields
    page = send(browser, PAGE, asked, files={"file": ("pool.jsonl", content)})
    assert page.status_code == 400
    assert said in fault(page, name)
    assert provider.get("/v1/admin/pools").json()["data"] == provider.get("/v1/admin/suites").json()["data"] == []


def test_a_form_of_another_site_imports_nothing(browser: TestClient, provider: TestClient) -> None:
    for path in (PAGE, f"{PAGE}/preview"):
        fields = {"form_token": "0" * 64, "name": "general", "kind": "pool"}
        page = browser.post(path, data=fields, files={"file": ("pool.jsonl", pool())})
        assert "too old" in page.text
    assert provider.get("/v1/admin/pools").json()["data"] == []
