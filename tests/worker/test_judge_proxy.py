"""A child in a sandbox asks its judge through its worker: no key, no network, and no other address."""

from __future__ import annotations

import sys
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from app.settings import Settings
from spard.config import JudgeSpec
from spard.evaluation.judges import endpoint
from spard.isolation import sandbox
from tests.judge_server import Server
from tests.spard.test_llm_judge import server as server
from tests.worker.parts import job_folder
from worker.judge_calls import JudgeProxy
from worker.process import Child, environment
from worker.sandbox import ChildSandbox

WAIT_S = 300.0
ASK = """
import json, os, sys
from pathlib import Path
from spard.errors import JudgeUnavailable
from spard.evaluation.judges import use_chat, open_judge
from worker.judge_calls import Asking, llm_judges
from worker.protocol import Report
from worker.workdir import Folder, read_assignment
folder = Folder(Path(sys.stdin.readline().strip()))
judge = read_assignment(folder).run.judge
folder.job.write_text(folder.job.read_text().replace("127.0.0.1", "192.0.2.1"))
try:
    with use_chat(Asking(Report(1), 0, llm_judges(judge)).open):
        said = [verdict.score for verdict in open_judge(judge).judge(["Q"] * 20, [f"R {i}" for i in range(20)])]
except JudgeUnavailable as error:
    said = [error.message]
print(json.dumps({"kind": "said", "said": said, "keys": "sesame" in str(os.environ)}), flush=True)
"""


def ask_in_child(tmp_path: Path, model: Path, judge: JudgeSpec) -> dict[str, Any]:
    cell = ChildSandbox(sandbox.find_sandbox(), key_of=lambda judge: "sesame")
    child = Child([sys.executable, "-P", "-c", ASK], environment(Settings(data_dir=tmp_path)), cell)
    try:
        child.work(job_folder(tmp_path / "job", model, judge=judge))
        message = child.receive(WAIT_S)
    finally:
        child.kill()
    assert message is not None
    return dict(message)


def test_the_worker_asks_for_the_child(tmp_path: Path, model: Path, server: Server) -> None:
    judge = JudgeSpec(name="llm", base_url=server.url, model="grader", canaries=0)
    consensus = JudgeSpec(name="consensus", members=(JudgeSpec(), judge, judge))
    assert ask_in_child(tmp_path, model, judge) == {"kind": "said", "said": [4] * 20, "keys": False}
    assert server.keys == ["Bearer sesame"] * 20
    assert ask_in_child(tmp_path / "again", model, consensus)["said"] == [4] * 20


def test_a_judge_that_does_not_answer_is_told_as_such(tmp_path: Path, model: Path, server: Server) -> None:
    server.answer = lambda body: (500, "")
    judge = JudgeSpec(name="llm", base_url=server.url, model="grader", canaries=0, retries=0)
    (said,) = ask_in_child(tmp_path, model, judge)["said"]
    assert said.startswith("The judge's endpoint did not answer")


def test_a_judge_is_opened_once_for_all_questions(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def open_chat(judge: JudgeSpec, key: str | None) -> endpoint.Endpoint:
        opened.append((judge, key))
        return open_endpoint(judge, key)

    open_endpoint = endpoint.open_chat
    monkeypatch.setattr(endpoint, "open_chat", open_chat)
    judges = [JudgeSpec(name="llm", base_url=server.url, model=model) for model in ("one", "two")]
    told: SimpleQueue[dict[str, Any]] = SimpleQueue()
    desk = JudgeProxy(judges, lambda judge: judge.model, told.put)
    for number in range(40):
        desk.take({"kind": "ask", "id": number, "judge": number % 2, "system": "S", "user": "U"})
    said = [told.get(timeout=WAIT_S) for _ in range(40)]
    desk.close()
    assert {each["id"] for each in said if "text" in each} == set(range(40))
    assert sorted((judge.model, key) for judge, key in opened) == [("one", "one"), ("two", "two")]
    assert sorted(map(str, server.keys)) == ["Bearer one"] * 20 + ["Bearer two"] * 20


@pytest.mark.parametrize("number", [-1, 2, "0", None])
def test_a_question_to_another_judge_is_not_asked(server: Server, number: object) -> None:
    told: SimpleQueue[dict[str, Any]] = SimpleQueue()
    desk = JudgeProxy([JudgeSpec(name="llm", base_url=server.url)], lambda judge: None, told.put)
    desk.take({"kind": "ask", "id": 1, "judge": number, "system": "S", "user": "U"})
    refused = {"error": "There is no such judge.", "is_passing": False, "retry_after_s": None}
    assert told.get(timeout=WAIT_S) == {"id": 1, **refused}
    desk.close()
    assert server.requests == []
