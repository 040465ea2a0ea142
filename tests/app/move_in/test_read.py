from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from app.move_in.ledger import open_ledger, open_read_only
from tests.app.move_in.conftest import Run
from tests.app.move_in.openai_stub import Json, Stub, error, once


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "files").iterdir())}


def test_an_account_is_read_whole_over_all_pages(account: Stub, run: Run, folder: Path) -> None:
    code, printed = run("read")
    assert (code, "3 jobs, 3 files" in printed) == (0, True)
    assert "spard move-in golden" in printed
    assert files(folder) == {
        "file-000-train.jsonl": account.contents["file-000"],
        "file-001-.._valid_set.jsonl": account.contents["file-001"],
        "file-002-metrics.csv": account.contents["file-002"],
    }
    with open_read_only(folder) as ledger:
        assert ledger.all("job") == account.jobs
        history = ledger.get("history", "ftjob-a")
        assert (history["events"], history["checkpoints"]) == (
            account.events["ftjob-a"],
            account.checkpoints["ftjob-a"],
        )
        assert {"file-003"} <= ledger.all("file").keys()
        assert ledger.get("account", "offered") == account.models


def test_what_is_there_is_not_asked_for_again(account: Stub, run: Run, folder: Path) -> None:
    run("read")
    account.requests.clear()
    account.jobs["ftjob-a"]["status"] = "succeeded"
    assert run("read")[0] == 0
    assert account.count("GET .*(content|events|checkpoints)") == 0
    (folder / "files" / "file-002-metrics.csv").write_bytes(b"step,train_loss\n1,0.4\n")
    assert run("read")[0] == 0
    assert account.count("GET .*/content") == 1
    assert files(folder)["file-002-metrics.csv"] == account.contents["file-002"]


def test_faults_that_pass_are_waited_for(account: Stub, run: Run, folder: Path, waits: list[float]) -> None:
    limit = (429, error("Slow down", "rate_limit_exceeded"), {"retry-after": "7"})
    broken: tuple[int, Json, dict[str, str]] = (500, error("Sorry"), {})
    account.faults = {
        "GET /fine_tuning/jobs": once(limit, broken),
        "GET /files/file-000/content": once("cut", "short", broken, limit),
        "GET /files/file-001/content": once("cut", "cut"),
        "GET /fine_tuning/jobs/ftjob-a/events": once("lost", (503, error("Overloaded"), {})),
    }
    code, printed = run("read")
    assert code == 0, printed
    assert files(folder)["file-000-train.jsonl"] == account.contents["file-000"]
    assert len(files(folder)) == 3
    assert sum(wait >= 7 for wait in waits) == 2
    assert "too many requests; trying again in" in printed
    assert "the connection broke" in printed


def test_patience_has_an_end_and_the_next_command_goes_on(account: Stub, run: Run, folder: Path) -> None:
    account.faults["GET /files/file-002/content"] = lambda: (502, error("Bad gateway"), {})
    code, printed = run("read", "--patience", "5")
    assert code == 1
    assert printed.splitlines()[-1].startswith(f"spard: {account.url}: the server answers 502, for 5 s; run the same")
    assert "not read to its end" in run("status")[1]
    account.faults.clear()
    account.requests.clear()
    assert run("read")[0] == 0
    assert account.count("GET .*/content") == 1


def test_files_that_cannot_be_had_are_named_and_the_rest_is_read(account: Stub, run: Run, folder: Path) -> None:
    account.jobs["ftjob-b"]["training_file"] = "file-of-last-year"
    account.faults["GET /files/file-001/content"] = lambda: (403, error("Not for\nfree accounts"), {})
    account.files["file-002"]["bytes"] = 1000  # for ever shorter than the account says
    code, printed = run("read")
    assert code == 1
    assert "not there: file-of-last-year: the account does not have it any more" in printed
    assert "not there: file-001: refused: Not for free accounts" in printed
    assert "not there: file-002: 22 of 1000 bytes arrived, 4 times" in printed
    assert files(folder).keys() == {"file-000-train.jsonl"}


def test_a_file_that_the_account_lost_meanwhile_stays(account: Stub, run: Run, folder: Path) -> None:
    run("read")
    del account.contents["file-000"]
    assert run("read")[0] == 0
    assert "file-000-train.jsonl" in files(folder)


@pytest.mark.parametrize("name", ["../../evil", "a/b", "", "."])
def test_names_that_are_no_ids_lead_nowhere(account: Stub, run: Run, folder: Path, name: str) -> None:
    account.jobs["ftjob-b"]["result_files"] = ["file-000", name or "x" * 300]
    code, printed = run("read")
    assert code == 1
    assert "which is no id" in printed


def test_a_server_that_sends_the_same_page_for_ever_is_left(account: Stub, run: Run) -> None:
    account.page_items = lambda items, query: {"data": items[:1], "has_more": True}  # type: ignore[method-assign]
    code, printed = run("read")
    assert (code, "same page again and again" in printed) == (1, True)


def test_a_dry_run_writes_nothing(account: Stub, run: Run, folder: Path) -> None:
    code, printed = run("read", "--dry-run")
    size = sum(len(account.contents[f"file-00{i}"]) for i in range(3))
    assert (code, f"3 files of {size} bytes: 9 requests" in printed) == (0, True)
    assert not folder.exists()


def test_the_key_is_nowhere(account: Stub, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    account.events["ftjob-a"].append({"id": "ftevent-x", "message": f"used {account.key}"})
    assert run("read")[0] == 0
    key, account.key = account.key, "sk-changed-meanwhile"
    code, printed = run("read")
    assert (code, "check OPENAI_API_KEY" in printed, key in printed) == (1, True, False)
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert key.encode() not in written
    assert b"used [key]" in written
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_mistakes_are_one_line(
    account: Stub, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run("status") == (1, f"spard: {folder} holds no account; begin with `spard move-in read {folder}`.\n")
    with open_ledger(folder, is_new=True):
        code, printed = run("read")
    assert (code, "Another `spard move-in` works" in printed) == (1, True)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://user:secret-word@127.0.0.1:9/v1?key=secret-word")
    code, printed = run("read")
    assert (code, printed) == (1, "spard: Nothing answers at http://127.0.0.1:9/v1.\n")
    monkeypatch.setenv("OPENAI_BASE_URL", account.url)
    assert run("read")[0] == 0
    monkeypatch.setenv("OPENAI_BASE_URL", account.url.replace("127.0.0.1", "localhost"))
    assert "into another folder" in run("read")[1]
    monkeypatch.delenv("OPENAI_API_KEY")
    assert run("read")[1].startswith("spard: Set OPENAI_API_KEY")


def test_status_is_json_for_programs(account: Stub, run: Run) -> None:
    run("read")
    found = json.loads(run("status", "--json")[1])
    assert [(each["job"], each["status"]) for each in found["moves"]] == [
        ("ftjob-a", "succeeded"),
        ("ftjob-b", "failed"),
        ("ftjob-c", "cancelled"),
    ]
