"""A long prompt is read in a process of its own: other replies do not wait for it, whatever comes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from spard.data.chat import render_prompt
from spard.models.base import load_base
from spard.release.manifest import verify
from tests.spard.parts import write_model
from tests.spard.test_rendering import THINKS_UNLESS_TOLD
from tests.worker.engine_in_process import QUESTIONS, alone, line
from worker.engine.requests import read_prompts

TOO_LONG = "so many words, " * 2000
LONG_LINE: dict[str, Any] = {"stop": ["never said" * 90] * 16}  # which makes a request long, and its prompt not


class Process:
    """An engine as the API starts it, but without a sandbox; `reader` is the process that reads long prompts."""

    def __init__(self, model: Path) -> None:
        order: dict[str, Any] = {
            "source": str(model),
            "revision": None,
            "quantization": "none",
            "device": "cpu",
            "threads": 1,
        }
        order |= {"rows": 8, "adapter_bytes": 1 << 30, "template_arguments": {}}
        command = [sys.executable, "-m", "worker.engine", json.dumps(order), str(os.getpid())]
        self.running = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.tell("a folder")
        assert self.next_message()["kind"] == "ready"
        children = psutil.Process(self.running.pid).children()
        self.reader, _ = sorted(children, key=lambda each: (each.create_time(), each.pid))  # the other compiles schemas

    def tell(self, what: object) -> None:
        assert self.running.stdin
        self.running.stdin.write(json.dumps(what).encode() + b"\n")
        self.running.stdin.flush()

    def next_message(self) -> dict[str, Any]:
        assert self.running.stdout
        found: dict[str, Any] = {"kind": "stepped"}
        while found["kind"] == "stepped":  # told each second
            found = json.loads(self.running.stdout.readline())
        return found

    def text(self, number: int) -> str:
        """Return the reply to a request; fail if anything is said of another request before it is done."""
        text = ""
        while (said := self.next_message())["kind"] != "done":
            assert (said["id"], said["kind"] in ("started", "piece")) == (number, True)
            text += said.get("text", "")
        return text.strip()


@pytest.fixture(scope="module")
def process(model: Path) -> Iterator[Process]:
    process = Process(model)
    yield process
    process.running.kill()
    process.running.communicate()
    psutil.wait_procs([process.reader])


def test_others_are_answered_while_a_long_prompt_is_read(process: Process, model: Path) -> None:
    process.reader.suspend()
    process.tell(line(1, TOO_LONG, None))
    process.tell(line(2, QUESTIONS[1], None))
    assert process.text(2) == alone(model, None, QUESTIONS[1])
    process.reader.resume()
    refused = process.next_message()
    assert (refused["id"], refused["kind"], refused["code"]) == (1, "failed", "context_length_exceeded")
    assert "maximum context length is 256 tokens" in refused["message"]


def test_a_long_request_is_answered_as_a_short_one(process: Process, model: Path, adapters: list[Path]) -> None:
    process.tell(line(10, QUESTIONS[0], adapters[0].name, **LONG_LINE))
    assert process.next_message() == {"kind": "absent", "id": 10}
    manifest = verify(adapters[0]).manifest_sha256
    folder = str(adapters[0])
    process.tell({"op": "load", "adapter": adapters[0].name, "folder": folder, "manifest_sha256": manifest})
    assert process.next_message()["kind"] == "loaded"
    for number, adapter in enumerate((adapters[0], None), 11):
        process.tell(line(number, QUESTIONS[0], adapter.name if adapter else None, **LONG_LINE))
        assert process.text(number) == alone(model, adapter, QUESTIONS[0])


def test_long_prompts_take_turns_and_those_that_nobody_waits_for_are_passed_over(process: Process) -> None:
    process.reader.suspend()
    for number in (21, 22, 23):
        process.tell(line(number, TOO_LONG, None, project="many"))
    for number in (24, 25):
        process.tell(line(number, TOO_LONG, None, project="one"))
    for number in (21, 25):  # of which the first is being read
        process.tell({"op": "cancel", "id": number})
    process.tell(line(26, QUESTIONS[2], None))
    process.text(26)  # all of this was heard before
    process.reader.resume()
    assert [process.next_message()["id"] for _ in range(3)] == [22, 24, 23]
    process.tell(line(27, QUESTIONS[2], None, **LONG_LINE))
    process.text(27)


def test_the_reader_ends_with_its_engine(process: Process) -> None:
    process.running.kill()
    process.running.wait()
    process.reader.wait()


def test_a_whole_model_is_asked_in_the_mode_of_its_audit_in_long_prompts_too(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(THINKS_UNLESS_TOLD)
    asked = line(1, "Hello", None)["ask"]
    prompts = {}
    for mode in ("off", "on"):
        (folder / "manifest.json").write_text(json.dumps({"rendering": {"asked": mode}}))
        loaded = load_base(folder, device="cpu").tokenizer
        prompts[mode] = read_prompts(str(folder), None, {}, 256).ids(asked, None)
        assert prompts[mode] == render_prompt(loaded, asked["messages"])
    assert prompts["off"] != prompts["on"]
