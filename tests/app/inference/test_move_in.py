"""`spard move-in` from an account to the report, through the models that answer here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app import db
from app.db.tables import Job
from spard.commands import main
from tests.app.http.conftest import pool
from tests.app.inference.conftest import Lab
from tests.app.move_in.openai_stub import Stub, row, serve_stub

PROMPTS, TOKENS, SEED = 4, 8, 61


def answer(lab: Lab, model: str, prompt: str) -> str:
    ask: Any = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": TOKENS}
    return lab.client().chat.completions.create(model=model, **ask).choices[0].message.content or ""


def test_an_old_model_is_compared_with_what_its_job_made_here(
    served_lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The old model says at every other prompt what the new one will say, by the adapter of the same seed."""
    twin, folder = served_lab.release(SEED), tmp_path / "move"
    prompts = [f"What is {i}?" for i in range(PROMPTS)]
    same = {prompt: answer(served_lab, twin, prompt) for prompt in prompts[::2]}
    assert all(same.values())
    account = Stub(say=lambda body, n: same.get(body["messages"][-1]["content"], "something else"))
    train = account.add_file("train.jsonl", b"".join(row(f"Who is {i}?", f"It is {i}.") for i in range(12)))
    valid = account.add_file("valid.jsonl", b"".join(row(prompt, "It is so.") for prompt in prompts))
    account.add_job("ftjob-a", train, validation_file=valid)
    headers = {"authorization": f"Bearer {served_lab.key('org-customer', 'customer', 'admin')}"}
    file = {"file": ("pool.jsonl", pool())}
    assert httpx2.post(f"{served_lab.url}/admin/pools?name=general", files=file, headers=headers).is_success
    monkeypatch.setenv("OPENAI_API_KEY", account.key)
    monkeypatch.setenv("SPARD_BASE_URL", served_lab.url)
    monkeypatch.setenv("SPARD_API_KEY", served_lab.key())

    def run(name: str, *arguments: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["move-in", name, str(folder), *arguments])
        return int(ended.value.code or 0)

    with serve_stub(account):
        assert run("read", "--base-url", account.url) == 0
        golden = ("--replies", "2", "--max-tokens", str(TOKENS), "--base-url", account.url)
        assert run("golden", *golden) == 0, capsys.readouterr()
    assert run("file", "--model", "gpt-old=tiny") == 0, capsys.readouterr()
    with db.transaction(served_lab.app.state.engine) as session:
        filed = [job for job in session.query(Job) if (job.job_metadata or {}).get("moved_from") == "ftjob-a"]
        served_lab.publish(filed[0], SEED)
        new = filed[0].fine_tuned_model
    assert run("compare") == 0, capsys.readouterr()

    (found,) = json.loads((folder / "comparison.json").read_text())
    exact = found["measures"]["exact"]
    assert (found["new"], len(filed)) == (new, 1)
    assert [exact[name]["value"] for name in ("new_old", "old_old", "new_new")] == [0.5, 1.0, 1.0]
