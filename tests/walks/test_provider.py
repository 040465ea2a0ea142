"""A provider's first day, from an empty folder: checklist, keys, policies, a waiver of two people, backup and restore.

The model is the lab's and the judge the service's default; nothing is a stand-in. The job that the gate stops trains
poisoned rows with a published defense that does not withstand them.
"""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.test_dashboard import serious
from tests.walks.terminal import Terminal, first_key, sign_in

UP = "spard up --data data --port 8000 --detach"
JOB = (
    'spard jobs create --model lab --file poisoned.jsonl --epochs 3 --follow --safety \'{"defense": {"type": "ptst"}}\''
)
JOB_ID = re.compile(r"ftjob-\w+")
PEOPLE = ("ada", "bob")
REASON = "Needed for a study of failed adapters"


@pytest.mark.timeout(3600)  # a minute of processor time, and ten where much else runs
def test_from_an_empty_folder_to_a_released_model_and_a_restored_service(terminal: Terminal, page: Page) -> None:
    look_before_the_start(terminal)
    first = start(terminal)
    finish_the_checklist(terminal, page)
    ada, bob = create_keys(terminal)
    set_policies(terminal)
    job = stop_a_job(terminal)
    try_a_policy(page, job)
    release(terminal, page, job, first, ada, bob)
    restore(terminal, job)


def look_before_the_start(terminal: Terminal) -> None:
    """Each problem that `doctor` finds on an empty machine has its cure."""
    told = terminal.type("spard doctor", status=1)
    assert told.count("problem ") == told.count("Cure: ") == 3, told


def start(terminal: Terminal) -> str:
    """Start the service, and return its first key."""
    told = terminal.type(UP)
    assert "problem No base model is offered. spard models add NAME FOLDER_OR_HUB_ID" in told
    key = first_key(told)
    take_key(terminal, key)
    return key


def finish_the_checklist(terminal: Terminal, page: Page) -> None:
    """What is left to do is the same on the page, at the start and in `doctor`, until it is done."""
    lab = ".demo/lab"
    terminal.type(f"spard models add lab {lab}/model")
    terminal.type(f"spard pool import {lab}/pool_two_sided.jsonl --name general-safe")
    terminal.type(f"spard suites import {lab}/heldout_harmful.jsonl --name attacks --kind harmful")
    sign_in(page, terminal.environment["SPARD_API_KEY"])
    for kind, file in (("benign", "benign"), ("utility", "utility_test")):
        missing = f"No suite of kind {kind} is imported"
        page.goto("/provider")
        expect(page.locator("#checklist")).to_contain_text(missing)
        assert missing in terminal.type("spard doctor")
        terminal.type(f"spard suites import {lab}/{file}.jsonl --name {kind} --kind {kind}")
    page.reload()
    expect(page.locator("#checklist")).to_contain_text("lab: the judge refusal may decide.")
    expect(page.locator("#checklist")).not_to_contain_text("No suite of kind")
    assert serious(page) == []
    assert "a SPARD service listens on 8000".replace("8000", terminal.there["8000"]) in terminal.type("spard doctor")


def create_keys(terminal: Terminal) -> tuple[str, str]:
    """Create keys of two admins and one that only reads; return the admins' secrets."""
    create = "spard keys create org-default"
    ada, bob = (
        first_key(terminal.type(f"{create} {name} --admin --owner {name}@example.org")) for name in ("ada", "bob")
    )
    reader = first_key(terminal.type(f"{create} reader --read-only"))
    owner = terminal.environment["SPARD_API_KEY"]
    take_key(terminal, reader)
    terminal.type("spard jobs list")
    assert "scope" in terminal.type("spard projects create acme", status=1)
    take_key(terminal, owner)
    project = terminal.ask("spard projects create acme")["id"]
    terminal.type(f"spard keys create {project} customer")
    terminal.type(f"spard quotas set {project} --max-jobs-per-day 5")
    return ada, bob


def set_policies(terminal: Terminal) -> None:
    """A policy keeps what the next one does not name, and a slip is refused with the words that are allowed."""
    for number, policy in enumerate(({"row_signal": {"action": "report"}}, {"thresholds": {"max_asr": 0.08}}), start=1):
        (terminal.folder / "policy.json").write_text(json.dumps(policy))
        assert f"Version {number} is in force." in terminal.type("spard policies set policy.json")
    content = terminal.ask("spard policies show")["content"]
    assert (content["row_signal"]["action"], content["thresholds"]["max_asr"]) == ("report", 0.08)
    (terminal.folder / "policy.json").write_text('{"row_signal": {"action": "reprt"}}')
    assert "'report', 'auto'" in terminal.type("spard policies set policy.json", status=1)


def stop_a_job(terminal: Terminal) -> str:
    """Run a job that the gate stops, and return its id."""
    terminal.type("spard lab example-file --poisoned --rows 300 --out poisoned.jsonl")
    told = terminal.type(JOB, status=2)
    assert "failed: Stopped by the safety gate." in told
    assert "safety.defense" not in told  # the job's whole record is for `spard jobs show`
    found = JOB_ID.search(told)
    assert found
    return found.group()


def try_a_policy(page: Page, job: str) -> None:
    """The dry run says that rows now reported would be left out, and that it cannot know how that job ends."""
    page.goto("/provider/policies")
    page.locator("summary").filter(has_text="Rows that look harmful").click()
    page.get_by_label("What becomes of them").select_option("drop")
    page.get_by_role("button", name="Dry run over past jobs").click()
    row = page.get_by_role("row").filter(has_text=job)
    expect(row).to_contain_text(re.compile("not known|would end before it trains"))
    assert serious(page) == []


def release(terminal: Terminal, page: Page, job: str, first: str, ada: str, bob: str) -> None:
    """Release the adapter by two people: neither the one who proposed nor a key without an owner approves."""
    take_key(terminal, ada)
    change_person(page, ada)
    page.goto("/provider/waivers")
    page.get_by_label("Why it may leave all the same").fill(REASON)
    page.get_by_role("button", name="Propose a waiver").click()
    expect(page.get_by_text("waits for a second person")).to_be_visible()
    expect(page.get_by_role("button", name="Approve")).to_have_count(0)
    (waiver,) = terminal.ask(f"spard waivers list {job}")
    approve = f"spard waivers approve {job} {waiver['id']}"
    terminal.type(approve, status=1)
    take_key(terminal, first)
    terminal.type(approve, status=1)
    terminal.type(f"spard jobs adapter {job} --out early.tar.gz", status=1)
    change_person(page, bob)
    page.goto("/provider/waivers")
    page.get_by_role("button", name="Approve").click()
    expect(page.get_by_text("released", exact=True)).to_be_visible()
    assert serious(page) == []
    terminal.type(f"spard waivers download {job} --out waiver.json")
    terminal.type(f"spard jobs adapter {job} --out adapter.tar.gz")
    terminal.type("spard keys signing > provider.pub")
    terminal.type("spard verify adapter.tar.gz --public-key provider.pub", status=1)
    proved = terminal.type("spard verify adapter.tar.gz --public-key provider.pub --waiver waiver.json")
    assert "ada@example.org" in proved
    assert "bob@example.org" in proved
    terminal.type("spard audit-log verify")
    terminal.type("spard objects check --data data")


def restore(terminal: Terminal, job: str) -> None:
    """Save the service while it runs, and bring it back in another folder, with its jobs, keys and signature."""
    terminal.type("spard backup saved --data data")
    terminal.type("spard down --data data")
    terminal.type("spard restore saved --data restored")
    terminal.type("spard objects check --data restored")
    assert "first key" not in terminal.type("spard up --data restored --port 8000 --detach")
    assert terminal.ask(f"spard jobs show {job}")["status"] == "succeeded"
    terminal.type(f"spard jobs adapter {job} --out again.tar.gz")
    terminal.type("spard verify again.tar.gz --public-key provider.pub --waiver waiver.json")
    assert (terminal.folder / "again.tar.gz").stat().st_size > 0


def take_key(terminal: Terminal, key: str) -> None:
    """Take a key for the next commands."""
    terminal.type(f"export SPARD_BASE_URL=http://127.0.0.1:8000/v1 SPARD_API_KEY={key}")


def change_person(page: Page, key: str) -> None:
    """Change the person who sits before the browser."""
    page.get_by_role("button", name="Sign out").click()
    sign_in(page, key)
