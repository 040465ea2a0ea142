"""How the demo ends: it serves on at a terminal until Ctrl-C, and stops anywhere else; and what a failed job leaves."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
from openai import OpenAI

from examples import demo

ROOT = Path(__file__).resolve().parent.parent
# The demo's main with everything stubbed that trains; the service is a socket that listens.
STUBBED = """
import signal, socket, sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from examples import demo
from examples.demo_setups import SETUPS

@contextmanager
def service(setup):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            print("the service was stopped", flush=True)

demo.HOME = Path(sys.argv[1])
demo.service = service
demo.make_lab = demo.provide = demo.order = lambda *_: None
demo.follow = lambda *_: {name: SimpleNamespace(id=f"ftjob-{name}", error=None) for name in demo.JOBS}
demo.download = lambda client, name, job: demo.HOME / "results" / name
demo.ask = lambda *_: ("?", {})
demo.measure = lambda *_: {}
demo.show = demo.show_answers = lambda *_: None
(demo.HOME / "results").mkdir()
sys.exit(demo.main(SETUPS[sys.argv[2]]))
"""


def stub_command(home: Path, setup: str = "lab") -> list[str]:
    return [sys.executable, "-c", STUBBED, str(home), setup]


@pytest.mark.parametrize("inherited", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_person_gets_an_address_until_ctrl_c(inherited: signal.Handlers, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        stub_command(tmp_path),
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "60"},  # narrower than the lines: an address must stay whole
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, inherited),
    )
    os.close(theirs)
    said = read_terminal(ours, "Ctrl-C stops the service")
    found = re.search(r"Open (http://127\.0\.0\.1:\d+)/jobs/ftjob-defended\r?\n", said)
    assert found, said
    assert "sk-spard-demo-key" in said
    assert f"{found[1]}/jobs/ftjob-undefended" in said
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    said = read_terminal(ours, "jobs create")
    assert process.wait(timeout=60) == 0
    assert "the service was stopped" in said
    assert "Traceback" not in said
    os.close(ours)


@pytest.mark.parametrize(("stdin", "setup"), [(subprocess.DEVNULL, "lab"), (None, "lab"), (None, "real")])
def test_without_a_person_it_ends(tmp_path: Path, stdin: int | None, setup: str) -> None:
    done = subprocess.run(
        stub_command(tmp_path, setup), cwd=ROOT, stdin=stdin, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Ctrl-C" not in done.stdout
    assert "the service was stopped" in done.stdout


def read_terminal(terminal: int, words: str) -> str:
    said = ""
    while words not in said:
        try:
            read = os.read(terminal, 65536)
        except OSError:  # the other side is closed
            break
        if not read:
            break
        said += read.decode()
    return said


@pytest.mark.parametrize("has_report", [True, False])
def test_a_job_that_fails_leaves_its_report(has_report: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        found = {"gate": {"decision": "fail"}} if has_report else {"error": {"message": "There is no report."}}
        return httpx2.Response(200 if has_report else 400, json=found)

    monkeypatch.setattr(demo, "HOME", tmp_path)
    client = OpenAI(api_key="key", http_client=httpx2.Client(transport=httpx2.MockTransport(answer)), max_retries=0)
    job = SimpleNamespace(id="ftjob-1", status="failed", error=SimpleNamespace(message="Attacks succeed."))
    with pytest.raises(SystemExit, match=r"ftjob-1 ended as failed: Attacks succeed\.") as ended:
        demo.download(client, "defended", job)
    report = tmp_path / "results" / "defended-report.json"
    assert report.exists() == has_report == (str(report) in str(ended.value))
