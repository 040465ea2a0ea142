"""An agent with nothing but `llms.txt` and the pages gets from a file to an answer (docs/agents.md), on a real service.

The service trains a tiny model and audits it, which takes longer than other tests do.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.test_walk import KEY, Walk, walk
from tools import llms

__all__ = ["walk"]  # a fixture
_LINK = re.compile(r"\[[^]]+\]\(([^)#\s]+\.md)(?:#[^)]*)?\)")
_KEEP = re.compile(r"Keep `([\w.]+)` as `(\w+)`")
_REPEAT = re.compile(r"Repeat while `(\w+)` is ((?:`\w+`(?:,| or)? ?)+)")


@dataclass
class Agent:
    """A program that reads the documentation in a folder, does what a page says, and keeps what it is told to keep."""

    folder: Path
    variables: dict[str, str]
    answers: list[Any] = field(default_factory=list)

    def find(self, question: str) -> str:
        """Return the page to which `llms.txt` leads for a question: the first link on a line that has its words."""
        for line in (self.folder / "llms.txt").read_text().splitlines():
            if question in line and (link := _LINK.search(line)):
                return (self.folder / link.group(1)).read_text()
        raise AssertionError(f"llms.txt leads nowhere for {question!r}")

    def follow(self, page: str) -> None:
        """Do each section that has a block, in order."""
        for section in page.split("\n## ")[1:]:
            for block in re.findall(r"```bash\n(.+?)```", section, re.DOTALL):
                self._do(block, section)

    def _do(self, block: str, section: str) -> None:
        repeat = _REPEAT.search(section)
        answer = self._call(block)
        while repeat and answer[repeat.group(1)] in re.findall(r"`(\w+)`", repeat.group(2)):
            time.sleep(0.2)
            answer = self._call(block)
        self.answers.append(answer)
        for path, name in _KEEP.findall(section):
            self.variables[name] = str(_value_of_path(answer, path))

    def _call(self, block: str) -> Any:
        command = block.replace("curl ", "curl --silent --fail-with-body ", 1)
        done = subprocess.run(
            ["bash", "-c", command], env=os.environ | self.variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}"
        return json.loads(done.stdout)


def _value_of_path(answer: Any, path: str) -> Any:
    for part in path.split("."):
        answer = answer[int(part) if part.isdecimal() else part]
    return answer


@pytest.fixture(scope="module")
def documentation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documentation")
    llms.write(folder)
    return folder


def test_an_agent_gets_from_a_file_to_an_answer(walk: Walk, documentation: Path) -> None:
    url = f"{walk.there['http://127.0.0.1:8000']}/v1"
    os.environ |= {"SPARD_BASE_URL": url, "SPARD_API_KEY": KEY}  # the walk takes them back
    walk.type("spard models add my-model /models/Qwen2.5-7B-Instruct")
    walk.type("spard pool import general-safe.jsonl --name general-safe")
    walk.type("spard suites import redteam.jsonl --name redteam --kind harmful")
    agent = Agent(documentation, {"SPARD_BASE_URL": url, "SPARD_API_KEY": KEY})

    agent.follow(agent.find("from a training file to an answer"))

    assert len(agent.answers) == 8
    job = agent.answers[5]
    assert (job["status"], agent.variables["MODEL"]) == ("succeeded", "my-model"), job["error"]
    assert agent.variables["TUNED"].startswith("ft:my-model")
    assert agent.answers[6]["sentence"]
    assert agent.variables["ANSWER"]


def test_every_page_is_listed_and_every_link_of_llms_txt_leads_to_a_page(documentation: Path) -> None:
    links = _LINK.findall((documentation / "llms.txt").read_text())
    written = {path.relative_to(documentation).as_posix() for path in documentation.rglob("*.md")}
    assert {*links} == written
    assert len(written) > 60


def test_links_between_pages_lead_to_pages(documentation: Path) -> None:
    lost = set()
    for path in documentation.rglob("*.md"):
        for link in _LINK.findall(path.read_text()):
            if "://" not in link and not (path.parent / link).resolve().is_file():
                lost.add((path.name, link))
    assert lost == set()


def test_a_line_has_the_title_and_the_first_sentence_of_its_page() -> None:
    text = llms.llms_txt()
    assert text.startswith("# SPARD\n\n> ")
    assert "- [Jobs](jobs.md): A job takes OpenAI's fields and SPARD's own beside them." in text
    assert llms.summary("# T\n\n| a | b |\n\nSee [this](x.md) first. Then that.") == "See this first."
    assert llms.summary("# T\n\n| a |\n") == ""
