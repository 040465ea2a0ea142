"""A newcomer's first hour, from an empty folder: README's lines on the lab that `make demo` leaves, then an own file.

The judge is the service's default, which is measured on the lab's model. Nothing is a stand-in.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests import blocks
from tests.browser.test_dashboard import serious
from tests.walks.terminal import Terminal, first_key, sign_in

SUPPORT = Path(__file__).parents[1] / "first_support_file.jsonl"
FILLED_IN = {  # what README leaves to the reader, and `make demo` names at its end
    "/models/Qwen2.5-7B-Instruct": ".demo/lab/model",
    "general-safe.jsonl": ".demo/lab/pool_two_sided.jsonl",
    "redteam.jsonl": ".demo/lab/heldout_harmful.jsonl",
}
ADVICE = "choose a base model that has read such text"


@pytest.mark.timeout(3600)  # a minute of processor time, and ten where much else runs
def test_from_readme_to_an_answer_and_to_an_own_file(terminal: Terminal, page: Page) -> None:
    terminal.there |= FILLED_IN
    start(terminal)

    told = terminal.type("spard lab example-file")
    assert "no file of another kind, such as support chats" in told
    (script,) = (block.text for block in blocks.to_run("README.md", "python"))
    (terminal.folder / "script.py").write_text(terminal.fill(script).replace("sleep(5)", "sleep(1)"))
    assert terminal.type(f"{sys.executable} script.py") != ""
    sign_in(page, terminal.environment["SPARD_API_KEY"])
    expect(page.get_by_role("cell", name="succeeded")).to_be_visible()
    page.get_by_role("link", name="train.jsonl").first.click()
    expect(page.get_by_role("link", name="Download adapter")).to_be_visible()
    expect(page.locator("main")).to_contain_text("rows of the file that were held out of the training")
    assert serious(page) == []

    try_an_own_file(terminal, page)


def try_an_own_file(terminal: Terminal, page: Page) -> None:
    """The support rows of a lamp shop end with a model, or were told before training what stands in their way.

    The lab has read word problems alone. How many of its own prompts it refuses differs between processors, and so does
    whether the gate holds the job back. It once ended as `too_many_rows_dropped`, or as inconclusive without a next
    step.
    """
    shutil.copy(SUPPORT, terminal.folder / "support.jsonl")
    followed = terminal.run("spard jobs create --model my-model --file support.jsonl --follow")
    said = " ".join(followed.stdout.split())
    assert said.index("The base model has not learned words like your file's") < said.index("Step 1/"), said
    assert said.index(ADVICE) < said.index("Step 1/")
    job = terminal.ask("spard jobs list")[0]
    page.goto(f"/jobs/{job['id']}")
    expect(page.locator("main")).to_contain_text(ADVICE)
    expect(page.locator("main")).to_contain_text(
        re.compile("[45] held-out rows")
    )  # though most of the rows are suspicious
    assert serious(page) == []
    if job["status"] == "succeeded":
        assert followed.returncode == 0
        return
    assert followed.returncode == 2, said
    assert job["error"]["code"] == "safety_gate_failed", said
    assert "on suite" in job["error"]["message"]
    expect(page.get_by_role("heading", name="What now")).to_be_in_viewport()
    expect(page.locator("#next li")).to_have_count(2)


def start(terminal: Terminal) -> None:
    """Type README's first block of a terminal, with the key that its first line shows."""
    block = next(block.text for block in blocks.to_run("README.md", "bash") if "spard up" in block.text)
    for line in block.splitlines():
        told = terminal.type(line)
        if line.startswith("spard up"):
            terminal.there["sk-spard-..."] = first_key(told)
